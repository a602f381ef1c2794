"""Memory of the machine: what models need, and what is available.

May use: `errors`, `options`, `system`.
"""
