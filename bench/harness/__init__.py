"""Shared parts of benchmarks: the engine or service under test, workloads and reports.

This package may import `models`.
"""
