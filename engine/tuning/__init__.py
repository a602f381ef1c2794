"""Measure which configuration of a model is fastest on this machine, for `cellama tune`.

May use: the whole engine.
"""
