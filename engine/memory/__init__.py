"""The machine's memory: the needs of models, and the available memory.

May use: `errors`, `options`, `system`.
"""
