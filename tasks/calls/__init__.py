"""Turn calls of tasks into messages: options of Celery, steps of a canvas, and jobs queued with their ledger entries.

This package may import `contract`, `connection` and `state`.
"""
