"""A user's app whose tasks follow cellama's jobs in a canvas. Each task counts its runs in Redis."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

URL = os.environ["CELLAMA_REDIS_URL"]
RUNS_KEY = "chaos:steps"  # hash: name of a step → how often it has run
PARTS_KEY = "chaos:parts"  # hash: name of a chord's body → how many results it got

app = Celery("steps", broker=URL, backend=URL, set_as_current=False)


def _count(name: str) -> None:
    app.backend.client.hincrby(RUNS_KEY, name, 1)


@app.task  # type: ignore[untyped-decorator]
def after_job(result: dict[str, Any], name: str) -> str:
    """Run after a job, as a link or as the last step of a chain."""
    _count(name)
    return str(result["text"])


@app.task  # type: ignore[untyped-decorator]
def after_failure(job_id: str, name: str) -> None:
    """Run after a failed job or chord, as an errback."""
    _count(name)


@app.task  # type: ignore[untyped-decorator]
def after_parts(results: list[dict[str, Any]], name: str) -> int:
    """Run after the parts of a chord, as its body."""
    app.backend.client.hset(PARTS_KEY, name, len(results))
    _count(name)
    return len(results)
