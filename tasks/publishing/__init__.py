"""Convert the events of engines into events and results of jobs, and write them to Redis.

This package may import the engine, `middleware`, `broker`, `state`, `connection` and `contract`. Only workers import
this package.
"""
