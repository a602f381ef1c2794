"""Connect to Redis, convert its errors, and wrap the private APIs of Celery and kombu that cellama uses.

This package may import `contract` and the settings.
"""
