"""The Redis keys of cellama and who owns them.

cellama:journal:{job_id}   stream   the events of a job, entry (seq+1)-0; publisher; TTL
cellama:events:{db}:{job_id} channel the same events, live; publisher. Channels know no databases, so it names its own
cellama:job:{job_id}       hash     ledger entry (docs/delivery.md); producer, then the worker that runs it; TTL
cellama:cancel:{job_id}    string   somebody wants the job to end; TTL
cellama:waiting:{queue}    zset     jobs that have no slot yet, the next one first (see `waiting_score`)
cellama:running            zset     jobs that have started and not ended, by time of start
cellama:deadlines          zset     jobs with a timeout that have not ended, by the time at which it is over
cellama:queues             set      queues that had jobs
cellama:dead               zset     jobs that ended workers again and again, by time of death
cellama:reaper             string   lock of the worker that looks for lost jobs; expires
cellama:batch:{run_id}     hash     a bulk run, as its command sees it; that command; TTL
cellama:batches            zset     bulk runs by their last word; entries go with their TTL
cellama:workers            hash     worker name → JSON entry; each worker its own, renewed every 2 s
cellama:queue:{model}…     list     Celery's queues, one list per priority (names.py); `:default` is a model here
cellama:kombu:unacked      hash     messages that a worker holds, by tag; kombu, under a name of our own: by default
                                    all Celery apps of a database share one, and ours gives messages back after seconds
cellama:kombu:unacked_index zset    the same tags by time of delivery, renewed by the worker; kombu
cellama:kombu:unacked_mutex string  lock of the worker that looks for ended leases; kombu; TTL
celery-task-meta-{job_id}  string   Celery's results; TTL
"""

from __future__ import annotations

WORKERS_KEY = "cellama:workers"
RUNNING_KEY = "cellama:running"
DEADLINES_KEY = "cellama:deadlines"
QUEUES_KEY = "cellama:queues"
DEAD_KEY = "cellama:dead"
REAPER_KEY = "cellama:reaper"
BATCHES_KEY = "cellama:batches"
UNACKED_KEY = "cellama:kombu:unacked"
UNACKED_INDEX_KEY = "cellama:kombu:unacked_index"
UNACKED_MUTEX_KEY = "cellama:kombu:unacked_mutex"
PRIORITY_WEIGHT = 1e11  # seconds; more than any time of submission


def journal_key(job_id: str) -> str:
    return f"cellama:journal:{job_id}"


def batch_key(run_id: str) -> str:
    return f"cellama:batch:{run_id}"


def job_key(job_id: str) -> str:
    return f"cellama:job:{job_id}"


def cancel_key(job_id: str) -> str:
    return f"cellama:cancel:{job_id}"


def waiting_key(queue: str) -> str:
    return f"cellama:waiting:{queue}"


def waiting_score(priority: int, submitted_at: float) -> float:
    """The place of a job among those that wait: by priority, then by time of submission (unix s)."""
    return priority * PRIORITY_WEIGHT + submitted_at


def events_channel(job_id: str, database: int) -> str:
    return f"cellama:events:{database}:{job_id}"


def stream_id(seq: int) -> str:
    """The id of the journal entry of an event; ids start at 1 because Redis has no entry 0-0."""
    return f"{seq + 1}-0"
