"""The models of a worker process, and the threads that maintain jobs and the worker itself.

This package may use `publishing`, `middleware`, `app` and lower layers, and the engine. Only workers import this
package.
"""
