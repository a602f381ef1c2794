"""Shared parts of the benchmarks, such as the engine or service under test, workloads and reports.

This package may import `models`.
"""
