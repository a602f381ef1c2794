"""The engine thread and its step (schedule → forward → update), the embedder thread, and handles for their callers.

This package may import the packages that docs/architecture.md lists above `core`. llama.cpp is used only through
`backend`.
"""
