"""Turn task calls into messages: settle Celery's options, route canvas steps, and queue jobs with their ledger entries.

This package may import `contract`, `connection` and `state`.
"""
