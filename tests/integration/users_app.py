"""A user's own Celery app, with a worker of its own: it imports cellama's tasks, as applications do."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, chord, group

from cellama.tasks import generate

URL = os.environ["CELLAMA_REDIS_URL"]
app = Celery("users", broker=URL, backend=URL)
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "seed": 1}


@app.task
def load(text: str = "Once upon a time") -> str:
    return text


@app.task
def count(results: list[dict[str, Any]]) -> int:
    return len(results)


@app.task
def text_of(result: dict[str, Any]) -> str:
    return str(result["text"])


@app.task
def note_failure(job_id: str) -> None:
    app.backend.client.set(f"test:failed:{job_id}", "1", ex=600)


@app.task(bind=True)
def becomes_a_job(self: Any, prompt: str) -> Any:
    raise self.replace(generate.s("tiny", prompt, **GREEDY))


@app.task(bind=True)
def becomes_jobs(self: Any, prompts: list[str]) -> Any:
    raise self.replace(group(generate.s("tiny", prompt, **GREEDY) for prompt in prompts))


@app.task
def asks_within(prompts: list[str]) -> str:
    return str(chord((generate.s("tiny", prompt, **GREEDY) for prompt in prompts), count.s()).apply_async().id)
