"""Measure which setup of a model is the fastest on this machine: `python -m cellama.engine.tuning`, for `cellama tune`.

May use: all of the engine.
"""
