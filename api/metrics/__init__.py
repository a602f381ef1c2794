"""Metrics that belong to no worker, which `cellama metrics` reads from Redis (ADR 023).

This package may import `keys`, and `tasks` except the modules that run in workers.
"""
