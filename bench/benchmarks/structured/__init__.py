"""Benchmarks of structured output: the cost of schemas, whether texts conform, and other projects' clients."""
