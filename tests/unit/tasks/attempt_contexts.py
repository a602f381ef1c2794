"""Contexts of attempts for tests of middlewares."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from cellama.tasks.broker.pool import Interruption, JobControl
from cellama.tasks.contract.kinds.generate import TASK_GENERATE
from cellama.tasks.middleware import AttemptContext, Middleware, Middlewares
from cellama.tasks.state.ledger import Attempt, new_run


def context(job_id: str = "a-job", **fields: Any) -> AttemptContext:
    """Return the context of a first attempt at a job that waited for 2 s. `fields` override this."""
    record = Attempt(job_id, new_run(), 1, 1, "run", 2.0)
    usual = {
        "record": record,
        "task": TASK_GENERATE,
        "queue": "q",
        "priority": 3,
        "parameters": {"model": "m", "prompt": "a secret"},
        "headers": {},
        "submitted_at": time.monotonic() - 2.0,
    }
    return AttemptContext(**{**usual, **fields})


@contextlib.contextmanager
def running(
    middleware: Middleware, attempt: AttemptContext, interruption: Interruption | None = None
) -> Iterator[Middlewares]:
    """Run the attempt in this block, and suppress the exception that ends it."""
    middlewares, control = Middlewares([middleware]), JobControl(1)
    with contextlib.suppress(Exception), middlewares.around(attempt, control):
        if interruption is not None:
            control.interrupt(interruption)
        yield middlewares
