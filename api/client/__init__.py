"""The Python client, which consists of a blocking class and an asyncio class.

This package may import `batch`, and any part of `tasks` except the packages that run in workers.
"""
