"""The engine thread and its step (schedule → forward → update), the embedder thread, and handles for other threads.

May use: `scheduling`, `text`, `system`, and the packages above them. llama.cpp is used only through `backend`.
"""
