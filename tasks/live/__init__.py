"""The streams of many jobs for one event loop, over two connections to Redis (docs/adr/018-shared-subscriptions.md).

May use `state`, `connection` and `contract`; api.client's AsyncClient uses it.
"""
