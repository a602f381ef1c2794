"""Write GGUF files with random weights for benchmarks and tests.

This package does not import the other packages of the benchmarks.
"""
