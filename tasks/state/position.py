"""Where a job is, and when its turn comes, as far as that can be known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from redis import Redis

from cellama.tasks.contract.errors import UnknownJob
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_name

from .ledger import Ledger
from .registry import WorkerEntry, live_workers

JobState = Literal["waiting", "running", "done"]


@dataclass(frozen=True, slots=True)
class Position:
    """`ahead` counts the jobs that get a slot before this one; `eta_s` is None when no worker serves its model.

    Of a job that is done, `finish_reason` says how it ended, and `error` why, if it failed: as in its last event.
    """

    job_id: str
    state: JobState
    ahead: int = 0
    eta_s: float | None = 0.0
    finish_reason: str | None = None
    error: str | None = None


def position_of(redis: Redis, job_id: str) -> Position:
    """The position of a job. Raises UnknownJob."""
    ledger = Ledger(redis)
    state, ahead = ledger.state(job_id), ledger.place(job_id)
    if state is None:
        raise UnknownJob(
            f"there is no job {job_id}, or not any more; a job that plain Celery sent is known once it runs"
        )
    if state == "done":
        ending = ledger.ending(job_id)
        event = None if ending is None else ending.event
        if event is not None and event["type"] == "error":
            return Position(job_id, "done", finish_reason="error", error=event["message"])
        return Position(job_id, "done", finish_reason=None if event is None else event["finish_reason"])
    if ahead is None:
        return Position(job_id, "waiting" if state == "queued" else "running", 0, None if state == "queued" else 0.0)
    return Position(job_id, "waiting", ahead, estimate_s(live_workers(redis), ledger.queue(job_id) or "", ahead))


def estimate_s(workers: Sequence[WorkerEntry], queue: str, ahead: int) -> float | None:
    """Seconds until a job with so many before it gets a slot, if others take as long as those of late."""
    default = queue == queue_name(DEFAULT_MODEL)
    engines = [
        model["engine"]
        for worker in workers
        for model in worker.models
        if model["engine"] and (queue_name(model["id"]) == queue or (default and model["default"]))
    ]
    slots: int = sum(engine["slots_total"] for engine in engines)
    if not slots:
        return None
    free = slots - sum(engine["slots_prefilling"] + engine["slots_decoding"] for engine in engines)
    if ahead < free:
        return 0.0
    known = [engine["mean_slot_s"] for engine in engines if engine["mean_slot_s"]]
    mean_s = sum(known) / len(known) if known else 0.0
    return float(round((ahead - free + 1) * mean_s / slots, 3))
