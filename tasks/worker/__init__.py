"""The models of a worker process, and the threads that maintain jobs and the worker itself.

It may use `publishing`, `middleware`, `app` and lower layers, and the engine. Only workers import it.
"""
