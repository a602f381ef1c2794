"""The models of a worker process, and the threads that maintain its jobs and the process itself.

This package may import the engine, `publishing`, `middleware`, `app` and the layers below them. Only workers import
this package.
"""
