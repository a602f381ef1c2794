"""The Python client, blocking and for asyncio.

This package may import `batch`, and all of `tasks` except the packages that run in workers.
"""
