"""One attempt of one job in a worker, from its payload to its one end.

May use: `worker`, `publishing`, and what is above these; the engine. In workers only.
"""
