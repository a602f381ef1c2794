"""Run the attempts of jobs in a worker, each from its payload to its end.

This package may use `worker`, `publishing` and lower layers, and the engine. Only workers import this package.
"""
