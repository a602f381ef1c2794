"""Workloads, benchmarks, and programs that write model files."""
