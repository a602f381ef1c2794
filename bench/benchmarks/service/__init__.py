"""Benchmarks of complete jobs, through Redis and a worker: rate and latency."""
