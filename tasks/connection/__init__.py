"""Connections to Redis, its errors and clock, and the private parts of Celery and kombu that cellama uses.

It may import `contract` and the settings.
"""
