"""Model and adapter files, read before llama.cpp may end the process for what is in them; the format of states.

May use: `errors`, `system`.
"""
