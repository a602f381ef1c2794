"""Benchmarks of faults: killed workers, Redis restarts, hostile payloads, and their effects on jobs."""
