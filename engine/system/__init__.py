"""Access to the operating system: cores, control groups, threads, child processes, and a watchdog for threads.

This package must not import other engine packages.
"""
