"""Stream many jobs to one event loop over two connections to Redis (docs/adr/018-shared-subscriptions.md).

This package may import `state`, `connection` and `contract`. `AsyncClient` uses this package.
"""
