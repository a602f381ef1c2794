"""Metrics that belong to no worker, which `cellama metrics` reads from Redis (ADR 023).

It may import `keys`, and `tasks` except the modules that run in workers.
"""
