"""The commands that start processes on this machine: worker, up, demo, bench, tune, cache.

May use: `cli`, `client`, `machine`, the settings.
"""
