"""Metrics that don't belong to a worker. `cellama metrics` reads these metrics from Redis (ADR 023).

This package may import `keys`, and any part of `tasks` except the modules that run in workers.
"""
