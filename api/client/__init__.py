"""The Python client, blocking and for asyncio.

It may import `batch`, and all of `tasks` except the packages that run in workers.
"""
