"""Memory planning: how much memory models need, and how much the machine has available.

May use: `errors`, `options`, `system`.
"""
