"""Views that queue jobs and read their results and streams."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from celery import chain
from celery.result import AsyncResult
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.views.decorators.http import require_GET, require_POST

from cellama.api import Client, Event, JobError
from cellama.tasks import generate
from config import celery_app
from tasks import prompt_for, title_of

client = Client()  # threads can share the client


def submit(request: HttpRequest) -> HttpResponse:
    """Queue a chain of a site task, a job for the model, and another site task."""
    steps = chain(
        prompt_for.s(request.GET.get("animal", "fox")),
        generate.s(model="tiny", max_tokens=30, temperature=0),
        title_of.s(),  # the site's settings route this task to the site's queue
    )
    return JsonResponse({"id": steps.apply_async().id})


def result(request: HttpRequest, job_id: str) -> HttpResponse:
    """Return the title, or status 202 if the title is not ready yet."""
    job = AsyncResult(job_id, app=celery_app)
    if not job.ready():
        return JsonResponse({"state": job.state}, status=202)
    return JsonResponse({"title": job.get()})


@require_POST
def story(request: HttpRequest) -> HttpResponse:
    """Queue a story. The job continues if the browser disconnects."""
    try:
        job = client.generate("tiny", request.POST.get("prompt", "Once upon a time"), max_tokens=60)
    except JobError as error:
        return problem(error)
    return JsonResponse({"id": job.id})


@require_GET
def follow(request: HttpRequest, job_id: str) -> HttpResponse:
    """Stream past and live events, starting after the last event that the browser has received."""
    after = request.headers.get("last-event-id", "-1")
    if not after.removeprefix("-").isdecimal():
        return JsonResponse({"code": "invalid_request", "message": f"Last-Event-ID is {after!r}"}, status=400)
    try:
        if client.position(job_id).state == "done" and not list(client.stream(job_id, int(after))):
            return HttpResponse(status=204)  # the browser has all events, so this status stops its EventSource
        events = client.stream(job_id, int(after), timeout=math.inf, ping=15)
    except JobError as error:
        return problem(error)
    return StreamingHttpResponse(frames(events), content_type="text/event-stream")


def frames(events: Iterator[Event]) -> Iterator[str]:
    """Format a job's events as server-sent events."""
    try:
        for event in events:
            if event["type"] == "ping":
                yield ": ping\n\n"
            else:
                name = "failed" if event["type"] == "error" else event["type"]  # EventSource has its own `error`
                yield f"id: {event['seq']}\nevent: {name}\ndata: {json.dumps(event)}\n\n"
    except JobError as error:  # for instance, Redis was unreachable for too long
        yield f"event: failed\ndata: {json.dumps({'code': error.code, 'message': str(error)})}\n\n"


def problem(error: JobError) -> JsonResponse:
    """Return status 400 for an invalid parameter, 404 for an unknown job, and 503 if Redis is unreachable."""
    return JsonResponse({"code": error.code, "message": str(error)}, status=error.http_status)
