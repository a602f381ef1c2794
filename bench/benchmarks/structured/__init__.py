"""Benchmarks that measure the cost of schemas, and test generated texts and other projects' clients."""
