"""What is told of a worker's attempts and requests to the world outside: metrics and traces, as far as settings ask.

May use: `cellama.tasks.traces`, `worker/metrics/`, and what the modules of `worker` may.
"""
