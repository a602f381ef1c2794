"""Writers of GGUF files with random weights, for benchmarks and tests.

This package imports no other package of the benchmarks.
"""
