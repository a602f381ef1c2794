"""Send commands to workers through Celery's remote control, and wait until the commands have taken effect."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from celery import Celery

from cellama.tasks.contract.errors import JobFailed, JobTimeout, UnknownModel, UnknownWorker
from cellama.tasks.state.registry import WorkerEntry

REPLY_TIMEOUT_S = 10.0  # time for workers to reply to a command
REGISTRY_POLL_S = 0.1
Accepted = dict[str, float]  # worker → time on its own clock at which it accepted the command


@dataclass(frozen=True, slots=True)
class CommandTarget:
    """The targets of a command: one worker, the workers in a pool, or all workers."""

    worker: str | None = None
    pool: str | None = None

    def select(self, workers: Iterable[WorkerEntry], model_id: str | None) -> list[str]:
        """Return the names of the targeted workers that have the model. Raises UnknownWorker or UnknownModel."""
        running = list(workers)
        chosen = [
            entry
            for entry in running
            if self.worker in (None, entry.name, entry.name.partition("@")[0]) and self.pool in (None, entry.pool)
        ]
        if not chosen:
            name = f"worker {self.worker!r}" if self.worker is not None else "worker"
            pool = "" if self.pool is None else f" in pool {self.pool!r}"
            names = ", ".join(f"{entry.name} (pool {entry.pool})" for entry in running) or "none"
            raise UnknownWorker(f"no {name} is running{pool}; running workers: {names}")
        with_model = [e.name for e in chosen if model_id is None or any(m["id"] == model_id for m in e.models)]
        if not with_model and self.worker is None:
            raise UnknownModel(
                f"no running worker serves the model {model_id!r}; list the models with `cellama models list`"
            )
        return with_model or [entry.name for entry in chosen]


class Commands:
    """Sends commands to workers, and waits until the registry shows the commands' effects.

    Threads can share an instance.
    """

    def __init__(self, app: Celery, workers: Callable[[], list[WorkerEntry]]) -> None:
        self._app = app
        self._workers = workers

    def send(
        self, command: str, arguments: dict[str, Any], target: CommandTarget, model_id: str | None = None
    ) -> Accepted:
        """Send a command that changes workers, and return the workers that accepted it.

        With `model_id`, only workers that have the model receive the command. Raises UnknownWorker, UnknownModel, and
        JobFailed with the error of the first worker that rejects the command.
        """
        arguments = {**arguments, "whole_pool": target.worker is None}
        return {name: reply["at"] for name, reply in self.call(command, arguments, target, model_id).items()}

    def call(
        self, command: str, arguments: dict[str, Any], target: CommandTarget, model_id: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """Send a command, and return each worker's reply. Raises the same errors as `send`."""
        chosen = target.select(self._workers(), model_id)
        options = {"destination": chosen, "reply": True, "timeout": REPLY_TIMEOUT_S, "limit": len(chosen)}
        received = self._app.control.broadcast(command, arguments=arguments, **options)
        replies = {name: reply for by_worker in received or [] for name, reply in by_worker.items()}
        for name in chosen:
            reply = replies.get(name, {"error": f"no reply within {REPLY_TIMEOUT_S:g} s", "code": "timeout"})
            if "error" in reply:
                raise JobFailed(reply.get("code", "internal_error"), f"worker {name}: {reply['error']}")
        return {name: replies[name] for name in chosen}

    def wait_for_status(
        self,
        accepted: Accepted,
        key: str,
        status: Callable[[WorkerEntry], str | None],
        expected: str | None,
        timeout_s: float,
    ) -> None:
        """Wait until each worker's `status` is `expected` (None if removed) or the worker reports a failure.

        `key` is the `failure_key` of the model or the adapter. Raises JobTimeout, and JobFailed if all workers
        fail.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            entries = [worker for worker in self._workers() if worker.at >= accepted.get(worker.name, math.inf)]
            failed = {worker.name: worker.failures[key] for worker in entries if key in worker.failures}
            done = [worker for worker in entries if worker.name not in failed and status(worker) == expected]
            if failed and len(failed) == len(accepted):
                name, failure = next(iter(failed.items()))
                raise JobFailed(failure["code"], f"worker {name}: {failure['message']}")
            if len(failed) + len(done) == len(accepted):
                return
            time.sleep(REGISTRY_POLL_S)
        state = expected if expected == "evicted" else "loaded" if expected else "unloaded"
        raise JobTimeout(f"{key!r} is not {state} after {timeout_s:g} s; check its status with `cellama models list`")
