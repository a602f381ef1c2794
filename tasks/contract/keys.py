"""The Redis keys of cellama and who owns them.

cellama:journal:{job_id}   stream   the events of a job, entry (seq+1)-0; publisher; TTL
cellama:events:{job_id}    channel  the same events, live; publisher
cellama:workers            hash     worker name → JSON entry; each worker its own, renewed every 2 s
cellama:{model}[…1..9]     list     Celery's queues (see names.py)
celery-task-meta-{job_id}  string   Celery's results; TTL
"""

from __future__ import annotations

WORKERS_KEY = "cellama:workers"


def journal_key(job_id: str) -> str:
    return f"cellama:journal:{job_id}"


def events_channel(job_id: str) -> str:
    return f"cellama:events:{job_id}"


def stream_id(seq: int) -> str:
    """The id of the journal entry of an event; ids start at 1 because Redis has no entry 0-0."""
    return f"{seq + 1}-0"
