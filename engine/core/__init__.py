"""The engine thread with its step: schedule → forward → update, and the embedder thread. Other threads hold handles.

May use: `scheduling`, `text`, `system`, and the packages above these. llama.cpp is used only through `backend`.
"""
