"""Run processes on this machine, namely a Redis server, and child processes that are restarted when they crash.

This package may import `config`, and the error codes in `tasks.contract`.
"""
