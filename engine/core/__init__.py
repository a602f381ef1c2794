"""The engine's thread and what callers hold of it: schedule → forward → update, and the embedder's thread beside it.

May use: `scheduling`, `text`, `system`, and what is above these; llama.cpp only through `backend`.
"""
