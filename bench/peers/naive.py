"""Define a naive Celery task that runs one line at a time, with one `llama_cpp.Llama` per process."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult

from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness.workloads import num_common

from .celery_worker import celery_worker

URL, MODEL, THREADS, CONTEXT = "NAIVE_REDIS_URL", "NAIVE_MODEL", "NAIVE_THREADS", "NAIVE_CONTEXT"

Submit = Callable[[Sequence[int], int], AsyncResult]
TASK = "naive.complete"

app = Celery("naive", broker=os.environ.get(URL), backend=os.environ.get(URL), set_as_current=False)


@functools.cache
def _llama() -> Any:
    from llama_cpp import Llama

    threads = int(os.environ[THREADS])
    context = int(os.environ[CONTEXT])
    return Llama(os.environ[MODEL], n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)


@app.task(name=TASK)  # type: ignore[untyped-decorator]
def complete(prompt: list[int], num_new: int) -> dict[str, Any]:
    """Return a greedy completion that ignores end-of-text tokens.

    `computed` counts the prompt tokens that were not cached.
    """
    llama = _llama()
    kept = num_common(llama.input_ids[: llama.n_tokens].tolist(), prompt)
    tokens = list(itertools.islice(llama.generate(prompt, temp=0.0), num_new))
    text = llama.detokenize(tokens).decode(errors="replace")
    return {"text": text, "tokens": len(tokens), "computed": len(prompt) - kept}


@contextlib.contextmanager
def naive_worker(folder: Path, model: Path, *, processes: int, threads: int, context: int) -> Iterator[Submit]:
    """Run a Celery worker with a separate Redis, and yield a function that sends `complete` tasks."""
    redis = RedisServer.start(folder / "naive-redis")
    own = {URL: redis.url, MODEL: str(model), THREADS: str(threads), CONTEXT: str(context)}
    producer = Celery(broker=redis.url, backend=redis.url, set_as_current=False)
    options = ("--concurrency", str(processes), "--pool", "prefork", "--without-gossip", "--without-mingle")
    try:
        with celery_worker(__name__, "naive", folder, *options, environment=own):
            yield lambda prompt, num_new: producer.send_task(TASK, (prompt, num_new))
    finally:
        producer.close()
        redis.stop()
