"""Connections to Redis, its errors, and its clock. Also the private parts of Celery and kombu that cellama uses.

May import `contract` and the settings.
"""
