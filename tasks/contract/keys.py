"""Define cellama's Redis keys. In this list, `cellama` stands for the setting `key_prefix`, and keys marked TTL expire.

Jobs:

`cellama:job:{job_id}` (hash): Ledger entry (docs/delivery.md). TTL after Celery has stored the outcome.
`cellama:journal:{job_id}` (stream): The job's events, with the ids (seq+1)-0. TTL after the job has ended.
`cellama:events:{db}:{job_id}` (channel): The same events, published live. `{db}` is the database number.
`cellama:cancel:{job_id}` (string): Exists if the job must be cancelled. TTL.
`cellama:context:{key}` (string): The tokens of a `finish_key` (tasks/state/contexts.py). Same TTL as results.
`cellama:reply:{digest}` (string): The `finish_key` of a chat's reply (tasks/state/replies.py). Same TTL as results.
`cellama:latest:{digest}` (string): A conversation's last `finish_key`, to explain failed reuse. Same TTL as results.
`cellama:turn:{key}` (string): JSON digests of the conversation that ends with a `finish_key`. Same TTL as results.
`cellama:waiting:{queue}` (sorted set): Jobs without a slot, sorted by `waiting_score`.
`cellama:backlog:{list}` (sorted set): A list's jobs that no worker holds, in submission order.
`cellama:shares:{list}\\0{node}` (sorted set): A node's child fairness keys with jobs in the backlog, by service.
`cellama:idle:{list}\\0{node}` (sorted set): A node's child fairness keys without jobs in the backlog, by service. TTL
of a day.
`cellama:costs:{list}` (hash): Mean cost per unit of work, by fairness key and job kind, and the largest recent cost of
a job, by job kind. TTL of a day.
`cellama:terms` (hash): Weights by fairness key, and limits by \\0 and name (`limit_name`). These values override the
settings.
`cellama:slots:{name}` (set): Held jobs that count against a limit.
`cellama:blocked:{name}` (set): Lists in which jobs with this name are waiting because the name's limit has been
reached.
`cellama:limited` (set): Names whose limits currently have slots in use.
`cellama:service:{period}` (sorted set): Fairness keys, by the cost of their jobs that ended in a 5-minute period. TTL.
`cellama:prefixes:{worker}` (sorted set): Hashes of the prefixes in a worker's cache, by last use. TTL.
`cellama:busy:{list}` (sorted set): Workers, by the time at which they finish prefilling jobs. TTL of a day.
`cellama:holders` (hash): The worker that last used a prefix. A full hash becomes `cellama:holders:old`.
`cellama:shortages` (hash): Number of tickets that each list lacked at the last check (tasks/state/lua/ledger.lua).
`cellama:running` (sorted set): Jobs that have started but not ended, by start time.
`cellama:leases` (sorted set): Jobs whose message a worker holds, by lease expiry.
`cellama:delayed` (sorted set): Jobs that are waiting for their ETA and that no worker holds, by ETA.
`cellama:due` (sorted set): Jobs that the reaper must check, because of a timeout or a missing outcome, by due time.
`cellama:missing` (sorted set): Running jobs that no worker holds, by detection time.
`cellama:queues` (set): Queues that have or had jobs.
`cellama:served` (sorted set): Queues that workers read or will read, by the time of the last report. TTL of 30 days.
`cellama:strays` (sorted set): Messages from plain Celery in queues that no worker reads, by detection time.
`cellama:watched` (hash): Start time and latest time of the search for jobs that no worker serves. TTL of 30 days.
`cellama:ended` (sorted set): The last MAX_ENDED jobs that ended, by end time. TTL.
`cellama:dead` (sorted set): Dead-letter jobs, by end time.
`celery-task-meta-{job_id}` (string): Celery's result. TTL.

Queues:

`cellama:queue:{model}…` (list): Celery's queues, one list per priority (names.py). Here, `:default` counts as a model.
`cellama:kombu:unacked…`: Unused, because the ledger replaces kombu's own records (tasks/broker/message.py).

Workers:

`cellama:workers` (hash): JSON entry of each worker, by name. Each worker updates its own entry every 2 s.
`cellama:machine:{machine}` (hash): JSON of the cores that each worker on a machine uses, by name. TTL of a minute.
`cellama:reaper:{duty}` (string): Lock of the worker that performs a duty of the reaper. TTL.
`cellama:looked` (string): Time of the last check for expired leases.
`cellama:accepts`: Unused. Writing zero bytes to this key tests whether Redis accepts writes.
`cellama:pools` (hash): JSON of the models that each pool's workers last served, by pool. TTL of 30 days.
`cellama:wanted:pool:{pool}` (hash): Desired state of a pool's workers, in addition to their settings. TTL of 30 days.
`cellama:wanted:worker:{worker}` (hash): Desired state of one worker, in addition to its settings. TTL of 30 days.
`cellama:loading:{model}` (string): Name of the worker that is loading an on-demand model. TTL.
`cellama:trials:{worker}` (hash): Model loads that the worker has started but not completed. TTL of a day.
`cellama:took:{class}:{kind}:{queue}` (list): Samples of service times, used for estimates. TTL of 30 days.

Bulk runs:

`cellama:batch:{run_id}` (hash): A bulk run's record, which its command writes. TTL.
`cellama:batches` (sorted set): Bulk runs, by the time of their last update.

Gateway:

`cellama:keys` (hash): JSON entry of each API key without its secret, by id.
`cellama:keys:used` (hash): Time when each API key was last used, rounded to a minute, by id.
`cellama:key:admissions:{id}` (sorted set): Recent requests with an API key (api/http/keys/lua). TTL.
`cellama:key:charges:{id}` (hash): Tokens that each recent request with an API key used. TTL.
`cellama:key:jobs:{id}` (sorted set): Running requests with an API key, by lease expiry. TTL.
`cellama:http:{kind}:{id}` (hash): A file or batch, with each field as JSON (docs/adr/019-batches.md). TTL.
`cellama:http:of:{kind}:{tenant}` (sorted set): Ids of a tenant's files or batches, by creation time. TTL.
`cellama:http:open` (sorted set): JSON [id, tenant] of unfinished batches, by creation time. TTL.
`cellama:http:expiring:{place}` (sorted set): Files in a storage location, by expiry. TTL.
`cellama:http:lease:{id}` (string): Token of the gateway that runs a batch or performs a duty. TTL.
`cellama:response:{id}` (string): Response data that the job does not contain (api/http/responses). TTL.
`cellama:console:{digest}` (string): JSON with the API key of a console session (api/http/console). TTL.
`cellama:chat:{owner}:{id}` (hash): A console chat, which belongs to an API key (console/chat_store.py). TTL.
`cellama:chats:{owner}` (sorted set): Ids of an API key's chats, by the time of their last change. TTL.

Webhooks:

`cellama:webhooks` (hash): JSON entry of each endpoint with its secret, by id.
`cellama:heeded:{job_id}` (string): The announcement to publish when the job ends. TTL.
`cellama:webhook:events` (stream): Announcements, until a gateway has turned them into deliveries.
`cellama:webhook:due` (sorted set): Deliveries, by the time of their next attempt, or by lease expiry.
`cellama:webhook:delivery:{id}` (hash): A delivery's content and number of attempts. TTL.
"""

from __future__ import annotations

from typing import Literal

from .names import key_prefix

MAX_ENDED = 10_000  # ended jobs that can be listed, which take about 1 MB
MAX_WEBHOOK_EVENTS = 100_000  # events that wait while no gateway runs; the oldest are dropped
IGNORED_FIELD = "ignored"  # field of a ledger entry, set if the job's result is not stored
PRIORITY_WEIGHT = 1e11  # in seconds; larger than any time of submission


def workers_key() -> str:
    return f"{key_prefix()}:workers"


def pools_key() -> str:
    return f"{key_prefix()}:pools"


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


def shortages_key() -> str:
    return f"{key_prefix()}:shortages"


def last_restore_key() -> str:
    return f"{key_prefix()}:looked"


def write_probe_key() -> str:
    return f"{key_prefix()}:accepts"


def queues_key() -> str:
    return f"{key_prefix()}:queues"


def served_key() -> str:
    return f"{key_prefix()}:served"


def strays_key() -> str:
    return f"{key_prefix()}:strays"


def watched_key() -> str:
    return f"{key_prefix()}:watched"


def dead_key() -> str:
    return f"{key_prefix()}:dead"


def ended_key() -> str:
    return f"{key_prefix()}:ended"


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


def desired_state_key(whose: Literal["pool", "worker"], name: str) -> str:
    return f"{key_prefix()}:wanted:{whose}:{name}"


def service_times_key(queue: str, kind: str, of: Literal["interactive", "bulk"]) -> str:
    return f"{key_prefix()}:took:{of}:{kind}:{queue}"


def loading_key(model_id: str) -> str:
    return f"{key_prefix()}:loading:{model_id}"


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


def reply_key(digest: str) -> str:
    return f"{key_prefix()}:reply:{digest}"


def latest_reply_key(digest: str) -> str:
    return f"{key_prefix()}:latest:{digest}"


def turn_key(key: str) -> str:
    return f"{key_prefix()}:turn:{key}"


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
    """Return the key of a tenant's index. Requests without a tenant share an index with an empty name."""
    return f"{key_prefix()}:http:of:{kind}:{tenant or ''}"


def http_expiring_key(place: str) -> str:
    return f"{key_prefix()}:http:expiring:{place}"


def http_lease_key(name: str) -> str:
    return f"{key_prefix()}:http:lease:{name}"


def announcement_key(job_id: str) -> str:
    return f"{key_prefix()}:heeded:{job_id}"


def webhook_delivery_key(delivery_id: str) -> str:
    return f"{key_prefix()}:webhook:delivery:{delivery_id}"


def console_session_key(digest: str) -> str:
    return f"{key_prefix()}:console:{digest}"


def response_key(response_id: str) -> str:
    return f"{key_prefix()}:response:{response_id}"


def console_chat_key(owner: str, chat_id: str) -> str:
    return f"{key_prefix()}:chat:{owner}:{chat_id}"


def console_chats_key(owner: str) -> str:
    return f"{key_prefix()}:chats:{owner}"


def waiting_key(queue: str) -> str:
    return f"{key_prefix()}:waiting:{queue}"


def backlog_key(list_key: str) -> str:
    return f"{key_prefix()}:backlog:{list_key}"


def shares_key(list_key: str) -> str:
    return f"{key_prefix()}:shares:{list_key}"


def idle_key(list_key: str) -> str:
    return f"{key_prefix()}:idle:{list_key}"


def costs_key(list_key: str) -> str:
    return f"{key_prefix()}:costs:{list_key}"


def terms_key() -> str:
    return f"{key_prefix()}:terms"


def slots_key(name: str) -> str:
    return f"{key_prefix()}:slots:{name}"


def blocked_key(name: str) -> str:
    return f"{key_prefix()}:blocked:{name}"


def limited_key() -> str:
    return f"{key_prefix()}:limited"


def service_key(period: int) -> str:
    return f"{key_prefix()}:service:{period}"


def held_prefixes_key(worker: str) -> str:
    return f"{key_prefix()}:prefixes:{worker}"


def busy_key(list_key: str) -> str:
    return f"{key_prefix()}:busy:{list_key}"


def prefix_holders_key() -> str:
    return f"{key_prefix()}:holders"


def old_prefix_holders_key() -> str:
    return f"{key_prefix()}:holders:old"


def waiting_score(priority: int, submitted_at: float) -> float:
    """Return a waiting job's score, which orders jobs by priority, then by submission time in Unix seconds."""
    return priority * PRIORITY_WEIGHT + submitted_at


def result_key(job_id: str) -> str:
    """Return the key under which Celery stores a result (celery.backends.base: task_keyprefix)."""
    return f"celery-task-meta-{job_id}"


def chord_key(group_id: str) -> str:
    """Return the prefix of Celery's keys for a chord (celery.backends.base: group_keyprefix)."""
    return f"celery-taskset-meta-{group_id}"


def events_channel(job_id: str, database: int) -> str:
    return f"{key_prefix()}:events:{database}:{job_id}"


def stream_id(seq: int) -> str:
    """Return the id of an event's journal entry. Ids start at 1, because Redis does not allow the id 0-0."""
    return f"{seq + 1}-0"
