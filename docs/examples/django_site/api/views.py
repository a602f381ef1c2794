"""Views that queue jobs, and read their results and streams."""

from __future__ import annotations

import json
from collections.abc import Iterator

from celery import chain
from celery.result import AsyncResult
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse

from cellama.api import Client, JobError
from cellama.tasks import generate
from config import celery_app
from tasks import prompt_for, title_of

client = Client()  # threads may share it


def submit(request: HttpRequest) -> HttpResponse:
    """A task of the site, a job for the model, a task of the site."""
    steps = chain(
        prompt_for.s(request.GET.get("animal", "fox")),
        generate.s(model="tiny", max_tokens=30, temperature=0),
        title_of.s().set(queue="site"),  # cellama's workers don't know the routes of the site
    )
    return JsonResponse({"id": steps.apply_async().id})


def result(request: HttpRequest, job_id: str) -> HttpResponse:
    """The title, as soon as it is there."""
    job = AsyncResult(job_id, app=celery_app)
    if not job.ready():
        return JsonResponse({"state": job.state}, status=202)
    return JsonResponse({"title": job.get()})


def story(request: HttpRequest) -> HttpResponse:
    """The text as it comes; if the reader goes away, the job is cancelled."""
    try:
        job = client.generate("tiny", request.GET.get("prompt", "Once upon a time"), max_tokens=60)
    except JobError as error:
        return JsonResponse({"code": error.code, "message": str(error)}, status=error.http_status)

    def lines() -> Iterator[str]:
        for event in job.stream(ping=15, cancel_on_exit=True):
            yield ": ping\n\n" if event["type"] == "ping" else f"data: {json.dumps(event)}\n\n"

    return StreamingHttpResponse(lines(), content_type="text/event-stream")
