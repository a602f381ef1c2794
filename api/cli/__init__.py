"""The command line `cellama`: one module per group of commands.

May use: `client`, `batch`, `machine`, the settings, and `tasks` but for what runs in workers.
"""

from .commands import app, main

__all__ = ["app", "main"]
