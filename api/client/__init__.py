"""The client in Python, blocking and for asyncio.

May import `batch`, and of `tasks` everything except the packages that run in workers.
"""
