"""Benchmarks that measure the rate and latency of complete jobs, which pass through Redis and a worker."""
