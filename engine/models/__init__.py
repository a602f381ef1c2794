"""Models by id: sources of their files, admission to memory, capabilities, loading and unloading.

May use: `core`, `llama`, `memory`, and what is above these.
"""
