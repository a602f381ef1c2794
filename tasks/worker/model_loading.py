"""Models that come and go while a worker runs: loaded in the background, then served, drained before they go."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery.worker import state
from redis.exceptions import RedisError

from cellama.config import ModelSettings
from cellama.config.settings import AdapterSettings
from cellama.engine import EngineError, ModelBusy, ModelManager
from cellama.tasks.app import num_jobs_of
from cellama.tasks.connection.kombu_internals import prefetch_more
from cellama.tasks.contract.names import DEFAULT_MODEL, evicting_key, queue_name
from cellama.tasks.contract.shapes.workers import LoadFailure

from .wanted import Key, adapter_key, key_text

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05
FAILURES_KEPT_S = 60.0
STOP_INTAKE_S = 10.0  # for jobs that came just then
FIRST_RETRY_S, LAST_RETRY_S = 30.0, 900.0


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a model or an adapter is not as it shall be, and when to try again."""

    failure: LoadFailure
    delay_s: float
    next_at: float  # monotonic


class Residency:
    """Loads and unloads, and keeps the consumer's queues and the pool's size in step with what is there."""

    def __init__(
        self,
        manager: ModelManager,
        consumer: Any,
        load: Callable[[ModelSettings], None],
        jobs: dict[str, int],
        on_change: Callable[[], None],
        loaded: Sequence[ModelSettings],
    ) -> None:
        """`load` loads a model and makes it tell its events; `jobs` has the jobs that each model adds to the pool.

        `loaded` are the models that are there already.
        """
        self._manager = manager
        self._consumer = consumer
        self._load_now = load
        self._jobs = jobs
        self.on_change = on_change
        self.loaded_as = {model.id: model for model in loaded}
        self.busy: set[Key] = set()  # something is done about them
        self.missed: dict[Key, Missed] = {}
        self._failures: dict[str, tuple[float, LoadFailure]] = {}
        self.evicted: dict[str, float] = {}  # by model: when its cache was emptied last

    def failures(self) -> dict[str, LoadFailure]:
        """Model id, or `failure_key` of an adapter → code and message of why it could not be (un)loaded lately."""
        now = time.monotonic()
        self._failures = {id_: entry for id_, entry in self._failures.items() if now - entry[0] < FAILURES_KEPT_S}
        return {id_: failure for id_, (_, failure) in self._failures.items()}

    def adapters(self) -> dict[Key, AdapterSettings]:
        """Those that are there, or on their way."""
        return {
            adapter_key(model_id, adapter.name): AdapterSettings(source=adapter.source, scale=adapter.scale)
            for model_id, model in list(self._manager.models().items())
            for adapter in model.adapters()
        }

    def load_model(self, model: ModelSettings) -> None:
        """Loads a model with its adapters and serves it. Raises what that does. Not on the main thread."""
        self._load_now(model)
        self.loaded_as[model.id] = model
        loaded = self._manager.get(model.id)
        self._jobs[model.id] = num_jobs_of(model, loaded.options.num_slots, loaded.capabilities)
        self._consumer.call_soon(self._begin_serving, model.id)

    def begin(self, key: Key, action: Callable[[], object]) -> None:
        """As `in_background`, by a command: an earlier failure is forgotten."""
        self.forget_failure(key)
        self.in_background(key, action)

    def forget_failure(self, key: Key) -> None:
        """Nothing is told of it any more."""
        self.missed.pop(key, None)
        self._failures.pop(key_text(key), None)

    def _begin_serving(self, model_id: str) -> None:
        self.resize(self._jobs[model_id])
        self._resume_intake([queue_name(model_id), *([queue_name(DEFAULT_MODEL)] if self._manager.default else [])])
        log.info("model %s is served from now on", model_id)
        self.on_change()

    def unload_model(self, model_id: str, timeout_s: float) -> None:
        """As `unload`, and nothing is written down. Raises ModelBusy. Not on the main thread."""
        queues, stopped = self.queues_of(model_id), threading.Event()

        def stop_intake() -> None:
            for queue in queues:
                self._consumer.cancel_task_queue(queue)
            stopped.set()

        self._consumer.call_soon(stop_intake)
        if not stopped.wait(STOP_INTAKE_S):
            self._consumer.call_soon(self._resume_intake, queues)  # after the other, whenever that is
            raise ModelBusy(f"the worker did not stop taking jobs of {model_id!r} within {STOP_INTAKE_S:g} s")
        self.drain(model_id, queues, timeout_s)

    def queues_of(self, model_id: str) -> list[str]:
        """The queues whose jobs are not served here without this model."""
        others = self._manager.models().keys() - {model_id}
        alone = self._manager.default == model_id and not others
        return [queue_name(name) for name in ([model_id, DEFAULT_MODEL] if alone else [model_id])]

    def _resume_intake(self, queues: Sequence[str]) -> None:
        for queue in queues:
            self._consumer.add_task_queue(queue)

    def drain(self, model_id: str, queues: Sequence[str], timeout_s: float) -> None:
        """Unloads a model of whose queues nothing more is taken; they are again if that fails. Raises ModelBusy."""
        deadline = time.monotonic() + timeout_s
        try:
            while _num_held(queues) and time.monotonic() < deadline:
                time.sleep(DRAIN_POLL_S)
            self._manager.unload(model_id, max(0.0, deadline - time.monotonic()))
        except EngineError:
            if self._manager.is_loaded(model_id):
                self._consumer.call_soon(self._resume_intake, queues)
            raise
        self.loaded_as.pop(model_id, None)
        self._consumer.call_soon(self.resize, -self._jobs.pop(model_id, 0))

    def resize(self, num_jobs: int) -> None:
        """So many more jobs, or fewer, may be in this worker from now on. Main thread only."""
        if num_jobs == 0:
            return
        pool = self._consumer.pool
        (pool.grow if num_jobs >= 0 else pool.shrink)(abs(num_jobs))
        prefetch_more(self._consumer, num_jobs)

    def evict(self, model_id: str) -> None:
        """Begins to empty the cache of a model, in a thread of its own. Raises UnknownModel, WrongCapability."""
        engine, name = self._manager.get(model_id).engine, evicting_key(model_id)
        self._failures.pop(name, None)

        def evict() -> None:
            try:
                engine.evict()
                self.evicted[model_id] = time.time()
            except EngineError as error:
                self._failures[name] = (time.monotonic(), {"code": error.code, "message": str(error)})
            except TimeoutError as error:
                self._failures[name] = (time.monotonic(), {"code": "timeout", "message": str(error)})
            except Exception as error:
                log.exception("the cache of %s could not be emptied", model_id)
                self._failures[name] = (time.monotonic(), {"code": "internal_error", "message": repr(error)})
            self.on_change()

        threading.Thread(target=evict, name=f"cellama-evict-{model_id}", daemon=True).start()

    def in_background(self, key: Key, action: Callable[[], object]) -> None:
        """Does it in a thread of its own; what goes wrong is told, and may be tried again later."""
        self.busy.add(key)
        threading.Thread(target=self.attempt, args=(key, action), name=f"cellama-{key_text(key)}", daemon=True).start()

    def attempt(self, key: Key, action: Callable[[], object]) -> None:
        """As `in_background`, on this thread."""
        self.busy.add(key)
        try:
            action()
            self.missed.pop(key, None)
        except EngineError as error:
            self._note_failure(key, error.code, str(error))
        except RedisError as error:
            self._note_failure(key, "redis_unreachable", str(error))
        except Exception as error:
            log.exception("%s could not be loaded or unloaded", key_text(key))
            self._note_failure(key, "internal_error", repr(error))
        finally:
            self.busy.discard(key)
        self.on_change()

    def _note_failure(self, key: Key, code: str, message: str) -> None:
        log.error("%s: %s", key_text(key), message)
        failure: LoadFailure = {"code": code, "message": message}
        earlier = self.missed.get(key)
        delay_s = min(LAST_RETRY_S, 2 * earlier.delay_s) if earlier else FIRST_RETRY_S
        self.missed[key] = Missed(failure, delay_s, time.monotonic() + delay_s)
        self._failures[key_text(key)] = (time.monotonic(), failure)


def _num_held(queues: Sequence[str]) -> int:
    """Jobs of these queues that this worker has taken and not ended."""
    return sum(request.delivery_info.get("routing_key") in queues for request in list(state.requests.values()))
