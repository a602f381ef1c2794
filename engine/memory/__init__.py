"""Memory planning: how much memory models need, and how much memory is available on the machine.

May use: `errors`, `options`, `system`.
"""
