"""The models of a worker process, and the threads that maintain jobs and the worker itself.

This package may import the engine, `publishing`, `middleware`, `app` and the layers below them. Only workers import it.
"""
