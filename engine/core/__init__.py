"""The engine thread with its step (schedule → forward → update), the embedder thread, and handles for other threads.

May use: `scheduling`, `text`, `system`, and the packages above these. llama.cpp is used only through `backend`.
"""
