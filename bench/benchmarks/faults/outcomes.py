"""Collect the outcomes of jobs from journals, the ledger and Celery's results, and detect violated guarantees."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import states

from cellama.bench.harness.reference_texts import ReferenceText
from cellama.tasks.contract.events import is_terminal
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import job_key, journal_key, leases_key, result_key, running_key

LOOK_S = 0.2  # seconds between two polls


def journal_of(redis: Any, job_id: str) -> list[Any]:
    """Return the events in the journal of a job."""
    return events_in(redis.xrange(journal_key(job_id)))


def ends_once(events: Sequence[Any]) -> bool:
    """Return whether no event is missing and only the last event is terminal."""
    seqs = [event["seq"] for event in events]
    dense = seqs == list(range(seqs[0], seqs[0] + len(seqs))) if seqs else False
    return dense and [is_terminal(event) for event in events] == [False] * (len(events) - 1) + [True]


def is_whole(events: Sequence[Any], text: str) -> bool:
    """Return whether the events are complete, end once, and contain exactly this text."""
    return ends_once(events) and events[0]["seq"] == 0 and "".join(event.get("text", "") for event in events) == text


def of_jobs(redis: Any, job_ids: Sequence[str], field: str) -> list[Any]:
    """Return one field of the ledger's entry for each job."""
    pipeline = redis.pipeline(transaction=False)
    for job_id in job_ids:
        pipeline.hget(job_key(job_id), field)
    return list(pipeline.execute())


def metas(redis: Any, task_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return Celery's stored result of each task, or an empty dictionary if no result is stored."""
    found = redis.mget([result_key(task_id) for task_id in task_ids]) if task_ids else []
    return [json.loads(meta) if meta else {} for meta in found]


def has_final_state(meta: Mapping[str, Any]) -> bool:
    return meta.get("status") in states.READY_STATES


def num_attempts(redis: Any, job_ids: Sequence[str]) -> list[int]:
    """Return the number of times that each job was started."""
    return [int(attempt or 0) for attempt in of_jobs(redis, job_ids, "attempt")]


def is_clean(redis: Any, job_ids: Sequence[str]) -> bool:
    """Return whether all of these jobs have ended, no message is held and no job is running."""
    if redis.zcard(leases_key()) or redis.zcard(running_key()):
        return False
    return set(of_jobs(redis, job_ids, "state")) <= {b"done"}


def wait_until_quiet(num_seen: Callable[[], int], is_complete: Callable[[int], bool], quiet_s: float) -> None:
    """Wait until `is_complete` accepts the result of `num_seen`, or the result is unchanged for `quiet_s` seconds."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        now = num_seen()
        if is_complete(now):
            return
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(LOOK_S)


def compare_text(job_id: str, text: str, expected: ReferenceText) -> str:
    """Compare a text with the text of an undisturbed run, and return "same", "tied" or "other".

    If the result is "other", print the position of the first difference.
    """
    kind = expected.compare(text)
    if kind == "other":
        place = expected.place_of_difference(text)
        around = slice(max(0, place - 40), place + 40)
        print(
            f"the text of {job_id} differs from character {place} on: {text[around]!r} instead of "
            f"{expected.text[around]!r}; ties: {expected.ties}",
            file=sys.stderr,
            flush=True,
        )
    return kind


def ends_row(redis: Any, job_ids: Sequence[str], stored: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return counts of ended jobs, results and attempts. `stored` contains each job's final Celery states."""
    return {
        "jobs": len(job_ids),
        "ended once": sum(ends_once(journal_of(redis, job_id)) for job_id in job_ids),
        "stored": sum(map(has_final_state, metas(redis, job_ids))),
        "stored otherwise": sum(len(set(stored.get(job_id, []))) > 1 for job_id in job_ids),
        "attempts": sum(num_attempts(redis, job_ids)),
        "unacked": "0" if is_clean(redis, job_ids) else "some",
    }


def broken_promises(where: str, row: Mapping[str, Any], all_jobs: Sequence[str], none: Sequence[str]) -> list[str]:
    """Return a line for each figure of `row` that has an unexpected value.

    Figures in `all_jobs` must equal the number of jobs. Figures in `none` must be 0.
    """
    lines = [f"{row[name]} of {row['jobs']} jobs: {name}" for name in all_jobs if row[name] != row["jobs"]]
    lines += [f"{row[name]} {name}" for name in none if row[name]]
    lines += ["messages are still held, or jobs still run"] * (row["unacked"] != "0")
    return [f"{where}: {line}" for line in lines]
