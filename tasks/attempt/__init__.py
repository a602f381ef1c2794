"""Run the attempts of jobs in a worker, each from its payload to its end.

It may use `worker`, `publishing` and lower layers, and the engine. Only workers import it.
"""
