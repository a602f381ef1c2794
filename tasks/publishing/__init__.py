"""Convert the events of engines into events and results of jobs, and write these to Redis.

May use `middleware`, `broker`, `state`, `connection` and `contract`, and the engine. Imported in workers only.
"""
