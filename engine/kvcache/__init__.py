"""Which tokens lie in which cells, who can take them over, and what is kept in RAM.

May use: `errors`, `backend`. No llama.cpp: memory is moved through a protocol.
"""
