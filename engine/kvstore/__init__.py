"""KV states in files: keys, the file format, a directory that processes share, and threads that read and write.

ADR 014 explains the design. May use: `errors`, `system`. A state consists only of bytes here, so this package imports
neither llama.cpp nor the model.
"""
