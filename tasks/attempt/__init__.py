"""Run the attempts of jobs in a worker, each from its payload to its end.

May use `worker`, `publishing` and lower layers, and the engine. Imported in workers only.
"""
