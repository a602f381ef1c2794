"""Memory planning: how much memory models need, and how much memory is available on the machine.

This package may import `errors`, `options` and `system`.
"""
