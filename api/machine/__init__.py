"""Processes on this machine: a Redis server, and child processes that are restarted when they crash.

This package may import `config`, and error codes of `tasks.contract`.
"""
