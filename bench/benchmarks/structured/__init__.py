"""Benchmarks that measure the cost of schemas, and test the conformance of texts and other projects' clients."""
