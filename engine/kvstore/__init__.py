"""KV states in files: keys, the file format, a directory that processes share, and threads that read and write.

ADR 014 explains the design. May use: `errors`, `system`. A state is bytes here: this package does not import
llama.cpp or the model.
"""
