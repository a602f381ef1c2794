"""The whole way of a job, through Redis and a worker: its rate and its latency."""
