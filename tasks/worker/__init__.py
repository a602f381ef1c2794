"""The models of a worker process, and the threads that maintain jobs and the worker itself.

May use `publishing`, `middleware`, `app` and lower layers, and the engine. Imported in workers only.
"""
