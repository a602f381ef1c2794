"""The `cellama` command line, with one module per command group.

This package may import `client`, `batch`, `machine`, the settings, and `tasks`, except for the modules that run in
workers.
"""

from .commands import app, main

__all__ = ["app", "main"]
