"""The job list with its filters, and the job page with a timeline and live output."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError, not_found
from cellama.api.http.gateway import Gateway, gateway_of
from cellama.api.http.sse import EventStream, keep_alive, with_errors
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import seconds_of
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.errors import InvalidJob, UnknownJob
from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.estimates.position import Position
from cellama.tasks.state.job_list import FILTER_STATES, FoundJob, FoundJobs, JobFilter, find_jobs
from cellama.tasks.state.job_record import JobRecord, read_job, read_output
from cellama.tasks.state.reader import MAX_AFTER

from .rendering import age_text, duration_text, fragment, page
from .session import base_of, console_caller, visible_tenant
from .visible import visible

log = event_logger(__name__)

PAGE_JOBS = 50  # rows of a page
MAX_TEXT_CHARS = 128  # of a part of an id
MAX_SHOWN_CHARS = 20_000  # of parameters and results
SHOWN_FIELDS = ("type", "seq", "text", "index", "line", "finish_reason", "message", "tool_calls")  # of live events
KIND_NAMES = tuple(sorted(task.removeprefix("cellama.") for task in KINDS))


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """An entry in a job's timeline. `at` is in Unix seconds. `state` determines the entry's colour."""

    at: float
    title: str
    detail: str = ""
    state: str = ""


async def jobs(request: Request) -> Response:
    """Handle `GET /console/jobs`."""
    caller = await console_caller(request)
    models = [model for model in (await gateway_of(request).stats())["classes"] if caller.may_use_model(model)]
    found = await _list(request, caller)
    return page(request, "jobs.html", states=FILTER_STATES, kinds=KIND_NAMES, models=models, **found)


async def job_rows(request: Request) -> Response:
    """Handle `GET /console/jobs/list`, the table that is updated while the visitor types and every few seconds."""
    caller = await console_caller(request)
    return fragment(request, "_jobs.html", **await _list(request, caller))


async def _list(request: Request, caller: Caller) -> dict[str, Any]:
    gateway, query = gateway_of(request), request.query_params
    wanted = JobFilter(
        state=query.get("state", "") if query.get("state") in FILTER_STATES else "",
        model=query.get("model", ""),
        kind=query.get("kind", "") if query.get("kind") in KIND_NAMES else "",
        text=query.get("id", "").strip()[:MAX_TEXT_CHARS],
        tenant=visible_tenant(caller),
    )
    after = query.get("after", "")
    with reaching_redis():
        found = await _found(gateway, wanted, after)
        record = await read_job(gateway.redis, wanted.text) if wanted.text and not found.jobs else None
        now: Any = await gateway.redis.time()
    fields = {"state": wanted.state, "model": wanted.model, "kind": wanted.kind, "id": wanted.text}
    filters = {name: text for name, text in fields.items() if text}
    return {
        "rows": [_row(job, seconds_of(now)) for job in found.jobs],
        "unlisted": record.job_id if record is not None and _may_see(caller, record) else None,
        "filters": fields,
        "has_filters": bool(filters),
        "after": after,
        "next_query": urlencode({**filters, "after": found.after}) if found.after else "",
        "first_query": urlencode(filters),
    }


def _row(job: FoundJob, now: float) -> dict[str, Any]:
    """Return a job, and the ages that its table row shows. `now` is the Redis clock's time in Unix seconds."""
    since = None if not job.changed_at else age_text(now - job.changed_at)
    return {"job": job, "submitted": age_text(now - job.submitted_at), "since": since}


async def _found(gateway: Gateway, wanted: JobFilter, after: str) -> FoundJobs:
    """Find the jobs that match the filters. Raises ApiError (400) for an invalid position."""
    try:
        return await find_jobs(gateway.redis, wanted, PAGE_JOBS, after)
    except InvalidJob as error:
        raise ApiError(400, str(error), param="after") from None


async def job(request: Request) -> Response:
    """Handle `GET /console/jobs/{id}`."""
    gateway, record = await _requested(request)
    with reaching_redis():
        output = await read_output(gateway.redis, record.job_id)
    return page(request, "job.html", output=output, **await _details(gateway, record))


async def job_details(request: Request) -> Response:
    """Handle `GET /console/jobs/{id}/details`, the part of the page that changes until the job has ended."""
    gateway, record = await _requested(request)
    return page(request, "_job.html", **await _details(gateway, record))


async def _requested(request: Request) -> tuple[Gateway, JobRecord]:
    """Return the gateway, and the job whose id is in the path.

    Raises ApiError (404) unless the visitor may see the job.
    """
    caller, gateway = await console_caller(request), gateway_of(request)
    job_id = request.path_params["job_id"]
    with reaching_redis():
        record = await read_job(gateway.redis, job_id)
    if record is None or not _may_see(caller, record):
        raise not_found("job", job_id)
    return gateway, record


def _may_see(caller: Caller, record: JobRecord) -> bool:
    tenant = visible_tenant(caller)
    return tenant is None or record.tenant == tenant


async def _details(gateway: Gateway, record: JobRecord) -> dict[str, Any]:
    position = None
    if record.state == "waiting":
        with contextlib.suppress(UnknownJob):  # it has expired in the meantime
            position = await gateway.client.position(record.job_id)
    with reaching_redis():
        now: Any = await gateway.redis.time()
    return {
        "job": record,
        "now": seconds_of(now),
        "position": position,
        "timeline": timeline_of(record, position),
        "usage": (record.end or {}).get("usage"),
        "timings": (record.end or {}).get("timings") or {},
        "warnings": (record.end or {}).get("warnings") or [],
        "tool_calls": (record.end or {}).get("tool_calls") or [],
        "parameters": None if record.parameters is None else shown_json(record.parameters),
        "result": None if record.result is None else shown_json(record.result),
    }


def shown_json(value: Any) -> str:
    """Return a value as indented JSON, shortened to MAX_SHOWN_CHARS."""
    text = json.dumps(value, ensure_ascii=False, indent=2)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}\n… ({len(text)} characters in total)"


def timeline_of(record: JobRecord, position: Position | None) -> list[TimelineEntry]:
    """Return the entries of a job's timeline in chronological order."""
    end: Mapping[str, Any] = record.end or {}
    timings: Mapping[str, Any] = end.get("timings") or {}
    entries = [TimelineEntry(record.submitted_at, "Submitted", f"to the queue of {record.model}")]
    if record.may_start_at is not None:
        entries.append(TimelineEntry(record.may_start_at, "May start", "because it has a countdown or an eta"))
    first_number = record.num_attempts - len(record.attempts) + 1
    for number, attempt in enumerate(record.attempts, first_number):
        entries.append(TimelineEntry(attempt.began_at, f"Attempt {number} started", f"on {attempt.worker}"))
        if attempt.ended_at is not None and attempt.ended_at != record.ended_at:
            title, why = ("lost", "its worker is gone") if attempt.is_lost else ("handed back", "its worker stopped")
            entries.append(TimelineEntry(attempt.ended_at, f"Attempt {number} {title}", why, "waiting"))
    slot_at = record.started_at
    if timings.get("queue_ms") is not None:
        slot_at = record.submitted_at + timings["queue_ms"] / 1000
    if slot_at is not None:
        entries.append(TimelineEntry(slot_at, "Got a slot", cache_text(end.get("usage")), "running"))
    if timings.get("ttft_ms") is not None:
        first_at = record.submitted_at + timings["ttft_ms"] / 1000
        entries.append(TimelineEntry(first_at, "First token", state="running"))
    if record.end is not None:
        entries.append(TimelineEntry(record.ended_at or _end_at(record, timings), *_end_text(record)))
    elif position is not None and position.state == "waiting":
        entries.append(TimelineEntry(math.inf, *_wait_text(position), "waiting"))
    return sorted(entries, key=lambda entry: entry.at)


def _wait_text(position: Position) -> tuple[str, str]:
    """Return the title and detail of the last entry in a waiting job's timeline."""
    ahead = {0: "it is the next one", 1: "1 job is ahead of it"}.get(
        position.ahead, f"{position.ahead} jobs are ahead of it"
    )
    if not position.served:
        return "Waits for a worker", f"no running worker serves its model; {ahead}"
    if position.eta_s is None:
        return "Waits for a slot", ahead
    return f"Gets a slot in about {duration_text(position.eta_s)}", ahead


def cache_text(usage: Mapping[str, Any] | None) -> str:
    """Return how much of the prompt was in the cache, or "" if the amount is unknown."""
    if not usage or not usage.get("prompt_tokens"):
        return ""
    prompt, cached, tier = usage["prompt_tokens"], usage.get("cached_tokens", 0), usage.get("cache_tier")
    if not cached:
        return f"prompt of {prompt} tokens, none of them cached"
    where = {"device": "in a slot", "ram": "in RAM", "disk": "on disk"}.get(tier or "", "cached")
    return f"prompt of {prompt} tokens, {cached} of them found {where}"


def _end_at(record: JobRecord, timings: Mapping[str, Any]) -> float:
    """Return the end time of a job that is no longer listed, based on the job's timings."""
    return record.submitted_at + (timings.get("duration_ms") or 0) / 1000


def _end_text(record: JobRecord) -> tuple[str, str, str]:
    """Return the title, detail and state of the last timeline entry."""
    end = record.end or {}
    if end.get("type") == "error":
        return "Failed", f"{end['message']} ({end['code']})", "failed"
    details = {
        "stop": "the model has finished its answer, or a stop sequence was found",
        "length": "max_tokens or the context length was reached",
        "timeout": "its timeout passed",
        "cancelled": "by a client",
    }
    titles = {"cancelled": "Cancelled", "timeout": "Timed out"}
    reason = end.get("finish_reason", "")
    is_text = record.kind in ("generate", "chat")
    detail = details.get(reason, "") if is_text or reason in titles else ""
    state = {"cancelled": "waiting", "timeout": "failed"}.get(reason, "succeeded")
    return titles.get(reason, "Finished"), detail, state


async def events(request: Request) -> Response:
    """Handle `GET /console/jobs/{id}/events`, which streams the events after `?after=` to an EventSource.

    A reconnecting browser sends `Last-Event-ID`. After the last event, the response status is 204, which stops the
    browser from reconnecting.
    """
    gateway, record = await _requested(request)
    after = _after(request.headers.get("last-event-id") or request.query_params.get("after") or "-1")
    if not record.is_open:
        with reaching_redis():
            last = (await read_output(gateway.redis, record.job_id)).last_seq
        if after >= last:
            return Response(status_code=204)
    ping_s = gateway.settings.gateway_keepalive_s
    stream = _frames(gateway, record.job_id, after, ping_s)
    return EventStream(with_errors(stream, _error_frame), stream.aclose)


def _after(text: str) -> int:
    """Return the seq of the last event that the browser has received. Raises ApiError (400)."""
    is_number = text.isascii() and text.removeprefix("-").isdecimal() and len(text) < 20
    if not is_number or not -1 <= int(text) < MAX_AFTER:
        raise ApiError(400, f"after is {text[:40]!r}; it must be the seq of an event, or -1", param="after")
    return int(text)


async def _frames(gateway: Gateway, job_id: str, after: int, ping_s: float) -> AsyncGenerator[bytes, None]:
    async with aclosing(gateway.client.stream(job_id, after, math.inf, ping=ping_s)) as found:  # type: ignore[type-var]
        async for event in found:
            yield keep_alive() if event["type"] == "ping" else frame_of(event)


def frame_of(event: Event) -> bytes:
    """Return an event's frame with the fields shown by the page. The frame's id is the event's seq."""
    fields: Mapping[str, Any] = event
    shown = {name: fields[name] for name in SHOWN_FIELDS if name in fields} | {"is_last": is_terminal(event)}
    if "text" in shown:
        shown["text"] = visible(shown["text"])
    return f"id: {fields['seq']}\ndata: {json.dumps(shown, ensure_ascii=False)}\n\n".encode()


def _error_frame(error: ApiError) -> bytes:
    data = {"type": "lost", "message": error.message}
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


async def cancel(request: Request) -> Response:
    """Handle `POST /console/jobs/{id}/cancel`, which cancels the job and redirects to its page."""
    gateway, record = await _requested(request)
    caller: Caller = request.state.console_caller
    if record.is_open:
        log.info("job cancelled in console", job=record.job_id, key=caller.key_id or "")
        await gateway.client.cancel(record.job_id)
    return RedirectResponse(f"{base_of(request)}/jobs/{record.job_id}", 303)


ROUTES = (
    Route("/console/jobs", jobs, methods=["GET"]),
    Route("/console/jobs/list", job_rows, methods=["GET"]),
    Route("/console/jobs/{job_id}", job, methods=["GET"]),
    Route("/console/jobs/{job_id}/details", job_details, methods=["GET"]),
    Route("/console/jobs/{job_id}/events", events, methods=["GET"]),
    Route("/console/jobs/{job_id}/cancel", cancel, methods=["POST"]),
)
