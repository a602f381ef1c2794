"""The Python client, with a blocking class and a class for asyncio.

This package may import `batch`, and any part of `tasks` except the packages that run in workers.
"""
