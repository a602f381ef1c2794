"""The Celery app of docs/canvas.md, which imports cellama's tasks as applications do."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from celery import Celery, chord, group

from cellama.tasks import generate

URL = os.environ["CELLAMA_REDIS_URL"]
PAGE = Path(__file__).parents[2] / "docs" / "canvas.md"
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
exec(BLOCKS[0])

app: Celery = globals()["app"]
# As in an application with several kinds of workers, which cellama's workers don't know.
app.conf.update(task_default_queue="shop", task_routes={f"{__name__}.text_of": {"queue": "shop.texts"}})
QUEUES = ("shop", "shop.texts", "shop.lengths")
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "seed": 1}


@app.task
def echo(text: str = "Once upon a time") -> str:
    return text


@app.task(queue="shop.lengths")
def length(results: list[dict[str, Any]]) -> int:
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
    return str(chord((generate.s("tiny", prompt, **GREEDY) for prompt in prompts), length.s()).apply_async().id)
