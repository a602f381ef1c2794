"""Stream many jobs in one event loop over two connections to Redis (docs/adr/018-shared-subscriptions.md).

It may use `state`, `connection` and `contract`. `AsyncClient` uses it.
"""
