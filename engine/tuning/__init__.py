"""`cellama tune`: which setup of a model is the fastest on this machine. `python -m cellama.engine.tuning` runs it.

May use: all of the engine.
"""
