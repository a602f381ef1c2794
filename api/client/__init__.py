"""The client in Python, blocking and for asyncio.

May use: `batch`, and `tasks` but for what runs in workers.
"""
