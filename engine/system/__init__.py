"""Access to the operating system: cores, control groups, threads and child processes, and the watchdog for threads.

This package must not import anything else from cellama's engine.
"""
