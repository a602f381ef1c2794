"""Benchmarks of one engine without the queue: rate, latency, cache and batch strategies."""
