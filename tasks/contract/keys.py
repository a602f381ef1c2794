"""The Redis keys of cellama and their owners. `cellama` stands for the setting `key_prefix`.

cellama:journal:{job_id}   stream   the events of a job, entry (seq+1)-0; publisher; TTL after the end
cellama:events:{db}:{job_id} channel the same events, live; publisher. Channels know no databases, so it names its own
cellama:job:{job_id}       hash     ledger entry (docs/delivery.md); producer, then its worker; TTL once the job has
                                    ended and Celery has its end
cellama:cancel:{job_id}    string   the job shall end; TTL
cellama:context:{key}      string   the tokens of a prompt and what was generated after it, under its `finish_key`
                                    (tasks/state/contexts.py); written with the end of its job; TTL of a result
cellama:waiting:{queue}    zset     jobs that have no slot yet, the next one first (see `waiting_score`)
cellama:running            zset     jobs that have started and not ended, by time of start
cellama:leases             zset     jobs whose message a worker holds, by the time at which its lease ends
cellama:delayed            zset     jobs whose ETA has not come and whose message no worker holds, by that time
cellama:due                zset     jobs to look at, by when: a timeout is over, or Celery should have the result
cellama:missing            zset     jobs that no queue and no worker seems to have, by when that was seen first
cellama:queues             set      queues that had jobs
cellama:dead               zset     jobs that ended workers again and again, by time of death
cellama:reaper:{duty}      string   lock of the worker that does a duty of the reaper's; expires
cellama:looked             string   when a worker last looked for ended leases
cellama:accepts            none     a worker's write to it changes nothing; Redis refuses that while it refuses writes
cellama:batch:{run_id}     hash     a bulk run, as its command sees it; that command; TTL
cellama:batches            zset     bulk runs by their last word; entries go with their TTL
cellama:workers            hash     worker name → JSON entry; each worker its own, renewed every 2 s
cellama:machine:{machine}  hash     worker name → JSON of its cores, for the workers of one machine; each worker its
                                    own, renewed every 2 s; TTL of a minute
cellama:wanted:pool:{pool} hash     what its workers shall have beside their settings; workers; TTL of 30 days
cellama:wanted:worker:{worker} hash the same, of one worker alone
cellama:trials:{worker}    hash     loads that it has begun and not ended; TTL of a day
cellama:took:{class}:{kind}:{queue} list what jobs asked for, how much work it was and how fast it
                                    went; workers; TTL of 30 days
cellama:keys               hash     id of an API key → JSON entry without its secret; `cellama keys`
cellama:keys:used          hash     id of an API key → when it was last used, to a minute; gateways
cellama:key:admissions:{id} zset    what a key has taken lately, and …:charges:{id} hash, how many tokens each had;
                                    gateways (api/http/keys/lua); TTL
cellama:key:jobs:{id}      zset     requests of a key that run, by the end of their leases; gateways; TTL
cellama:http:{kind}:{id}   hash     a file or batch of the gateway, each field as JSON (docs/adr/019-batches.md); TTL
cellama:http:of:{kind}:{tenant} zset ids of a tenant's files or batches, by when they were made; gateways; TTL
cellama:http:open          zset     JSON [id, tenant] of batches that have not ended, by when they were made; gateways;
                                    TTL
cellama:http:expiring:{place} zset  files that lie in a place, by when they expire; gateways; TTL
cellama:http:lease:{id}    string   the token of the gateway that drives a batch, or does a duty; expires
cellama:webhooks           hash     id of an endpoint → JSON entry with its secret; `cellama webhooks`
cellama:heeded:{job_id}    string   what is announced with the end of that job; a gateway, until the end; TTL
cellama:webhook:events     stream   what was announced; until a gateway has made deliveries of it
cellama:webhook:due        zset     deliveries by the time at which one is made, or its lease ends; gateways
cellama:webhook:delivery:{id} hash  what is to be delivered, and how often that was tried; gateways; TTL
cellama:response:{id}      string   what is known of a response beside its job (api/http/responses); gateways; TTL
cellama:queue:{model}…     list     Celery's queues, one list per priority (names.py); `:default` is a model here
cellama:kombu:unacked…     none     what kombu would keep of held messages under names that all Celery apps share; the
                                    ledger keeps it instead (tasks/broker/holding.py)
celery-task-meta-{job_id}  string   Celery's results; TTL
"""

from __future__ import annotations

from typing import Literal

from .names import key_prefix

MOST_WEBHOOK_EVENTS = 100_000  # that wait while no gateway runs; beyond that the oldest go
IGNORED_FIELD = "ignored"  # of a ledger entry: the job's result is not stored
PRIORITY_WEIGHT = 1e11  # seconds; more than any time of submission


def workers_key() -> str:
    return f"{key_prefix()}:workers"


def running_key() -> str:
    return f"{key_prefix()}:running"


def leases_key() -> str:
    return f"{key_prefix()}:leases"


def delayed_key() -> str:
    return f"{key_prefix()}:delayed"


def due_key() -> str:
    return f"{key_prefix()}:due"


def missing_key() -> str:
    return f"{key_prefix()}:missing"


def looked_key() -> str:
    return f"{key_prefix()}:looked"


def write_probe_key() -> str:
    return f"{key_prefix()}:accepts"


def queues_key() -> str:
    return f"{key_prefix()}:queues"


def dead_key() -> str:
    return f"{key_prefix()}:dead"


def batches_key() -> str:
    return f"{key_prefix()}:batches"


def api_keys_key() -> str:
    return f"{key_prefix()}:keys"


def http_open_key() -> str:
    return f"{key_prefix()}:http:open"


def api_keys_used_key() -> str:
    return f"{key_prefix()}:keys:used"


def webhooks_key() -> str:
    return f"{key_prefix()}:webhooks"


def webhook_events_key() -> str:
    return f"{key_prefix()}:webhook:events"


def webhook_due_key() -> str:
    return f"{key_prefix()}:webhook:due"


def unacked_key() -> str:
    return f"{key_prefix()}:kombu:unacked"


def unacked_index_key() -> str:
    return f"{key_prefix()}:kombu:unacked_index"


def unacked_mutex_key() -> str:
    return f"{key_prefix()}:kombu:unacked_mutex"


def machine_key(machine: str) -> str:
    return f"{key_prefix()}:machine:{machine}"


def wanted_key(whose: Literal["pool", "worker"], name: str) -> str:
    return f"{key_prefix()}:wanted:{whose}:{name}"


def took_key(queue: str, kind: str, of: Literal["interactive", "bulk"]) -> str:
    return f"{key_prefix()}:took:{of}:{kind}:{queue}"


def trials_key(worker: str) -> str:
    return f"{key_prefix()}:trials:{worker}"


def journal_key(job_id: str) -> str:
    return f"{key_prefix()}:journal:{job_id}"


def batch_key(run_id: str) -> str:
    return f"{key_prefix()}:batch:{run_id}"


def job_key(job_id: str) -> str:
    return f"{key_prefix()}:job:{job_id}"


def context_key(key: str) -> str:
    return f"{key_prefix()}:context:{key}"


def cancel_key(job_id: str) -> str:
    return f"{key_prefix()}:cancel:{job_id}"


def reaper_key(duty: str) -> str:
    return f"{key_prefix()}:reaper:{duty}"


def key_admissions_key(key_id: str) -> str:
    return f"{key_prefix()}:key:admissions:{key_id}"


def key_charges_key(key_id: str) -> str:
    return f"{key_prefix()}:key:charges:{key_id}"


def key_jobs_key(key_id: str) -> str:
    return f"{key_prefix()}:key:jobs:{key_id}"


def http_record_key(kind: Literal["file", "batch"], thing_id: str) -> str:
    return f"{key_prefix()}:http:{kind}:{thing_id}"


def http_records_key(kind: Literal["file", "batch"], tenant: str | None) -> str:
    """Whoever has no tenant has the index with an empty name, which no tenant can have. No id is that of an index."""
    return f"{key_prefix()}:http:of:{kind}:{tenant or ''}"


def http_expiring_key(place: str) -> str:
    return f"{key_prefix()}:http:expiring:{place}"


def http_lease_key(name: str) -> str:
    return f"{key_prefix()}:http:lease:{name}"


def heeded_key(job_id: str) -> str:
    return f"{key_prefix()}:heeded:{job_id}"


def webhook_delivery_key(delivery_id: str) -> str:
    return f"{key_prefix()}:webhook:delivery:{delivery_id}"


def response_key(response_id: str) -> str:
    return f"{key_prefix()}:response:{response_id}"


def waiting_key(queue: str) -> str:
    return f"{key_prefix()}:waiting:{queue}"


def waiting_score(priority: int, submitted_at: float) -> float:
    """The place of a job among those that wait: by priority, then by time of submission (unix s)."""
    return priority * PRIORITY_WEIGHT + submitted_at


def result_key(job_id: str) -> str:
    """Where Celery keeps a result (celery.backends.base: task_keyprefix)."""
    return f"celery-task-meta-{job_id}"


def chord_key(group_id: str) -> str:
    """Return the prefix of Celery's keys of a chord (celery.backends.base: group_keyprefix); `.s` is its size."""
    return f"celery-taskset-meta-{group_id}"


def events_channel(job_id: str, database: int) -> str:
    return f"{key_prefix()}:events:{database}:{job_id}"


def stream_id(seq: int) -> str:
    """The id of the journal entry of an event; ids start at 1 because Redis has no entry 0-0."""
    return f"{seq + 1}-0"
