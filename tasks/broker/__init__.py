"""Celery's consumer, pool, requests, remote control and result backend, adapted for cellama.

These modules use private APIs of Celery and kombu. This package may import `contract`, `connection`, `state` and
`calls`.
"""
