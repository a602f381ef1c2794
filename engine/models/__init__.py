"""Resolve the sources of models, load the models within a memory budget, and call and unload them by id.

May use: `core`, `llama`, `memory`, and what is above these.
"""
