"""Benchmarks of a single engine without the queue, which measure its rate, latency, cache and batch strategies."""
