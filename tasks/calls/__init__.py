"""Turn task calls into messages: resolve Celery's options, route canvas steps, and queue and record jobs.

This package may import `contract`, `connection` and `state`.
"""
