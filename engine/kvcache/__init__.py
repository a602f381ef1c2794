"""Which tokens lie in which cells, which sequence takes them over, and what is kept in RAM and on disk.

May use: `errors`, `backend`, `events`, `options`, `kvstore`. No llama.cpp: memory is moved through a protocol.
"""
