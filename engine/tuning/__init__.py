"""Tuning: measures which configuration of a model is the fastest on this machine, for `cellama tune`.

May use: all of the engine.
"""
