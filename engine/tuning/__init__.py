"""Measure which configuration of a model is fastest on this machine, for `cellama tune`.

This package may import the whole engine.
"""
