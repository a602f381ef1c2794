"""Commands to running workers, through Celery's remote control: models and adapters come and go."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from celery import Celery

from cellama.tasks.contract.errors import JobFailed, JobTimeout, UnknownModel, UnknownWorker
from cellama.tasks.state.registry import WorkerEntry

REPLY_S = 10.0  # for workers to answer a command
REGISTRY_POLL_S = 0.1
Begun = dict[str, float]  # by worker: when it took the command, by its clock


@dataclass(frozen=True, slots=True)
class Whom:
    """One worker alone; or all workers of a pool, or of every pool, and those that join it later."""

    worker: str | None = None
    pool: str | None = None

    def among(self, workers: Iterable[WorkerEntry], model_id: str | None) -> list[str]:
        """The names of those that are meant, and have the model. Raises UnknownWorker, UnknownModel."""
        alive = list(workers)
        chosen = [
            entry
            for entry in alive
            if self.worker in (None, entry.name, entry.name.partition("@")[0]) and self.pool in (None, entry.pool)
        ]
        if not chosen:
            asked = f"worker {self.worker!r}" if self.worker is not None else "worker"
            asked += "" if self.pool is None else f" in pool {self.pool!r}"
            live = ", ".join(f"{entry.name} (pool {entry.pool})" for entry in alive) or "none"
            raise UnknownWorker(f"no live {asked}; live: {live}")
        having = [e.name for e in chosen if model_id is None or any(m["id"] == model_id for m in e.models)]
        if not having and self.worker is None:
            raise UnknownModel(f"no live worker has a model {model_id!r}; `cellama models list` shows what there is")
        return having or [entry.name for entry in chosen]


class Commands:
    """Sends commands to workers, and waits until the registry shows their effect. Threads may share one."""

    def __init__(self, app: Celery, workers: Callable[[], list[WorkerEntry]]) -> None:
        self._app = app
        self._workers = workers

    def send(self, command: str, arguments: dict[str, Any], whom: Whom, model_id: str | None = None) -> Begun:
        """The workers that took a command, of those that are meant (and have the model).

        Raises what the first one that refuses says.
        """
        arguments = {**arguments, "whole_pool": whom.worker is None}
        return {name: answer["at"] for name, answer in self.ask(command, arguments, whom, model_id).items()}

    def ask(
        self, command: str, arguments: dict[str, Any], whom: Whom, model_id: str | None = None
    ) -> dict[str, dict[str, Any]]:
        """What each of those workers answers. Raises as `send`."""
        chosen = whom.among(self._workers(), model_id)
        options = {"destination": chosen, "reply": True, "timeout": REPLY_S, "limit": len(chosen)}
        replies = self._app.control.broadcast(command, arguments=arguments, **options)
        answers = {name: answer for reply in replies or [] for name, answer in reply.items()}
        for name in chosen:
            answer = answers.get(name, {"error": f"it did not answer within {REPLY_S:g} s", "code": "timeout"})
            if "error" in answer:
                raise JobFailed(answer.get("code", "internal_error"), f"worker {name}: {answer['error']}")
        return {name: answers[name] for name in chosen}

    def wait_for_status(
        self, begun: Begun, key: str, status: Callable[[WorkerEntry], str | None], wanted: str | None, timeout_s: float
    ) -> None:
        """Until something has a status on these workers, None standing for being gone, or they say why it has not;
        `key` is its failure_key. Raises JobFailed if it has it on none, JobTimeout."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            entries = [worker for worker in self._workers() if worker.at >= begun.get(worker.name, math.inf)]
            failed = {worker.name: worker.failures[key] for worker in entries if key in worker.failures}
            done = [worker for worker in entries if worker.name not in failed and status(worker) == wanted]
            if failed and len(failed) == len(begun):
                name, failure = next(iter(failed.items()))
                raise JobFailed(failure["code"], f"worker {name}: {failure['message']}")
            if len(failed) + len(done) == len(begun):
                return
            time.sleep(REGISTRY_POLL_S)
        doing = wanted if wanted == "evicted" else "loaded" if wanted else "unloaded"
        raise JobTimeout(f"{key!r} is not {doing} after {timeout_s:g} s; `cellama models list` shows its state")
