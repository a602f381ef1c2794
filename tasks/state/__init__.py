"""What Redis knows of jobs, workers and bulk runs: the ledger and its scripts, journals, the registry.

May use: `contract`, `connection`. No Celery.
"""
