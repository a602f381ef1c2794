"""Run a Redis server on this machine, and child processes that are restarted when they crash.

This package may import `config`, and the error codes in `tasks.contract`.
"""
