"""Resolve model sources, load models within a memory budget, and call and unload them by id.

May use: `core`, `llama`, `memory`, and the packages above them.
"""
