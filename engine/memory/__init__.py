"""What models take of the machine's memory, and what is left of it: arithmetic, and the system's figures.

May use: `errors`, `options`, `system`.
"""
