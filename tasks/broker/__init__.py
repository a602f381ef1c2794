"""Celery's consumer, pool, requests, remote control and result backend, adapted for cellama.

These modules use private parts of Celery and kombu. They may import `contract`, `connection`, `state` and `calls`.
"""
