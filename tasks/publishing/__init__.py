"""Convert the events of engines into events and results of jobs, and write them to Redis.

This package may use `middleware`, `broker`, `state`, `connection` and `contract`, and the engine. Only workers import
this package.
"""
