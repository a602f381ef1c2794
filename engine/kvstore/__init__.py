"""KV states in files: keys, the format, a directory that processes share, threads that read and write (ADR 014).

May use: `errors`, `system`. Nothing here knows a model or llama.cpp: a state is bytes.
"""
