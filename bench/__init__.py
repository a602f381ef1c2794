"""Workloads, benchmarks and model writers of the project."""
