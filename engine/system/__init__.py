"""Access to the operating system: cores, control groups, threads and child processes, and the watchdog for threads.

May import nothing else of cellama's engine.
"""
