"""KV states in files: keys, the file format, a directory that processes share, and threads that read and write states.

ADR 014 explains the design. This package may import `errors` and `system`. In this package, a state is just bytes, so
neither llama.cpp nor the model is imported.
"""
