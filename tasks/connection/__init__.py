"""Connections to Redis, its errors and clock, and the private parts of Celery and kombu that cellama uses.

This package may import `contract` and the settings.
"""
