"""Benchmarks that measure how killed workers, Redis restarts and hostile payloads affect jobs."""
