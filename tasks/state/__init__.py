"""The state in Redis: the ledger of jobs and its scripts, journals, contexts, bulk runs, and the registry of workers.

This package may import `contract` and `connection`, but not Celery.
"""
