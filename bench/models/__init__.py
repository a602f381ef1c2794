"""Writers of GGUF files with random weights, for speed work and for tests.

May use: nothing of the benchmarks.
"""
