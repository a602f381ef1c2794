"""The KV cache: which tokens are in which cells, prefixes that sequences reuse, and saved states in RAM and on disk.

May use: `errors`, `backend`, `events`, `options`, `kvstore`. Memory is accessed through the protocol `KvMemory`, so
this package doesn't import llama.cpp.
"""
