"""Writers of GGUF files with random weights, for benchmarks and tests.

May use: nothing of the benchmarks.
"""
