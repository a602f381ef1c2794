"""Load and unload models while a worker runs: in the background, with their queues and the pool's size in step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from celery.worker import state
from redis.exceptions import RedisError

from cellama.config import ModelSettings
from cellama.config.settings import AdapterSettings
from cellama.engine import EngineError, ModelBusy, ModelManager
from cellama.tasks.app import num_jobs_of
from cellama.tasks.contract.names import DEFAULT_MODEL, evicting_key, queue_name
from cellama.tasks.contract.shapes.workers import LoadFailure

from .desired_state import Key, adapter_key

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.05  # between two looks at the jobs that a model still has: nothing reports their end here
FAILURES_KEPT_S = 60.0  # for clients that wait for the result of a command; they look several times a second
STOP_INTAKE_S = 10.0  # for the event loop to stop taking jobs of a model; it does so at once unless Redis is away
FIRST_RETRY_S, LAST_RETRY_S = 30.0, 900.0  # after a failure; it doubles with each one, so a mistake costs little


@dataclass(frozen=True, slots=True)
class FailedAction:
    """Why the last load or unload of something failed, and when to retry it."""

    failure: LoadFailure
    at: float  # monotonic s
    delay_s: float

    @property
    def retry_at(self) -> float:
        return self.at + self.delay_s


class ModelLoader:
    """Loads and unloads models, and keeps the consumer's queues and the pool's size in step.

    Actions have names: those of `key_text` or `evicting_key`. One action of a name runs at a time.
    """

    def __init__(
        self,
        manager: ModelManager,
        consumer: Any,
        *,
        load: Callable[[ModelSettings], None],
        num_jobs: dict[str, int],
        loaded: Iterable[ModelSettings],
        on_change: Callable[[], None],
    ) -> None:
        """`load` loads a model and makes it publish its events. `loaded` are the models that are loaded already.

        `num_jobs` has the jobs that each model adds to the pool; it is updated here.
        """
        self._manager = manager
        self._consumer = consumer
        self._load = load
        self._num_jobs = num_jobs
        self.on_change = on_change
        self._loaded = {model.id: model for model in loaded}
        self.busy: set[str] = set()  # names of actions that run
        self.failed: dict[str, FailedAction] = {}  # by the name of the action
        self.evicted: dict[str, float] = {}  # by model: when its cache was emptied last

    # What is there

    def models(self) -> dict[str, ModelSettings]:
        """Return the settings with which each loaded model was loaded."""
        return {model_id: model for model_id, model in list(self._loaded.items()) if self._manager.is_loaded(model_id)}

    def adapters(self) -> dict[Key, AdapterSettings]:
        """Return the adapters that are loaded or loading."""
        return {
            adapter_key(model_id, adapter.name): AdapterSettings(source=adapter.source, scale=adapter.scale)
            for model_id, model in list(self._manager.models().items())
            for adapter in model.adapters()
        }

    def recent_failures(self) -> dict[str, LoadFailure]:
        """Return the failures of the last minute, by the name of the action."""
        now = time.monotonic()
        return {name: each.failure for name, each in list(self.failed.items()) if now - each.at < FAILURES_KEPT_S}

    def forget_failures(self, needed: set[str]) -> None:
        """Forget old failures of actions that are not needed any more."""
        now = time.monotonic()
        for name, each in list(self.failed.items()):
            if name not in needed and now - each.at >= FAILURES_KEPT_S:
                self.failed.pop(name, None)

    # Actions, each with its own thread

    def start(self, name: str, action: Callable[[], object]) -> None:
        """Run an action in the background. `failed` has its failure, which is to be retried later."""
        self.busy.add(name)
        threading.Thread(target=self.run, args=(name, action), name=f"cellama-{name}", daemon=True).start()

    def start_anew(self, name: str, action: Callable[[], object]) -> None:
        """Run an action that a command asks for. Its earlier failure is forgotten."""
        self.failed.pop(name, None)
        self.start(name, action)

    def run(self, name: str, action: Callable[[], object]) -> None:
        """Run an action on this thread."""
        self.busy.add(name)
        try:
            action()
            self.failed.pop(name, None)
        except EngineError as error:
            self._note_failure(name, error.code, str(error))
        except RedisError as error:
            self._note_failure(name, "redis_unreachable", str(error))
        except TimeoutError as error:
            self._note_failure(name, "timeout", str(error))
        except Exception as error:
            log.exception("models: %s failed", name)
            self._note_failure(name, "internal_error", repr(error))
        finally:
            self.busy.discard(name)
        self.on_change()

    def _note_failure(self, name: str, code: str, message: str) -> None:
        log.error("models: %s: %s", name, message)
        earlier = self.failed.get(name)
        delay_s = min(LAST_RETRY_S, 2 * earlier.delay_s) if earlier else FIRST_RETRY_S
        self.failed[name] = FailedAction({"code": code, "message": message}, time.monotonic(), delay_s)

    def start_emptying_cache(self, model_id: str) -> None:
        """Empty the cache of a model in the background. Raises UnknownModel, WrongCapability."""
        engine = self._manager.get(model_id).engine

        def empty_cache() -> None:
            engine.evict()
            self.evicted[model_id] = time.time()

        self.start_anew(evicting_key(model_id), empty_cache)

    # Loading, in an action

    def load_model(self, model: ModelSettings) -> None:
        """Load a model with its adapters and serve it. Raises what loading raises."""
        self._load(model)
        self._loaded[model.id] = model
        loaded = self._manager.get(model.id)
        self._num_jobs[model.id] = num_jobs_of(model, loaded.options.num_slots, loaded.capabilities)
        self._consumer.call_soon(self._serve, model.id)

    def _serve(self, model_id: str) -> None:
        self.resize_pool(self._num_jobs[model_id])
        self._resume_intake([queue_name(model_id), *([queue_name(DEFAULT_MODEL)] if self._manager.default else [])])
        log.info("models: %s is served from now on", model_id)
        self.on_change()

    def resize_pool(self, num_jobs: int) -> None:
        """Add that many threads to the pool, or remove them if negative. Main thread only."""
        pool = self._consumer.pool
        (pool.grow if num_jobs >= 0 else pool.shrink)(abs(num_jobs))

    # Unloading

    def stop_intake(self, model_id: str) -> list[str]:
        """Take no more jobs that only this model serves. Returns their queues. Main thread only."""
        others = self._manager.models().keys() - {model_id}
        is_only_default = self._manager.default == model_id and not others
        queues = [queue_name(name) for name in ([model_id, DEFAULT_MODEL] if is_only_default else [model_id])]
        for queue in queues:
            self._consumer.cancel_task_queue(queue)
        return queues

    def _resume_intake(self, queues: Sequence[str]) -> None:
        for queue in queues:
            self._consumer.add_task_queue(queue)

    def unload_model(self, model_id: str, timeout_s: float) -> None:
        """Stop the intake of a model, then drain and unload it. Raises ModelBusy. Not on the main thread."""
        queues: list[str] = []
        stopped = threading.Event()

        def stop() -> None:
            queues.extend(self.stop_intake(model_id))
            stopped.set()

        self._consumer.call_soon(stop)
        if not stopped.wait(STOP_INTAKE_S):
            self._consumer.call_soon(lambda: self._resume_intake(queues))  # it runs after `stop`, whenever that is
            raise ModelBusy(f"the worker did not stop taking jobs of {model_id!r} within {STOP_INTAKE_S:g} s")
        self.drain(model_id, queues, timeout_s)

    def drain(self, model_id: str, queues: Sequence[str], timeout_s: float) -> None:
        """Unload a model after its jobs. If that fails, its intake is resumed. Raises ModelBusy."""
        deadline = time.monotonic() + timeout_s
        try:
            while _num_held(queues) and time.monotonic() < deadline:
                time.sleep(DRAIN_POLL_S)
            self._manager.unload(model_id, max(0.0, deadline - time.monotonic()))
        except EngineError:
            if self._manager.is_loaded(model_id):
                self._consumer.call_soon(self._resume_intake, queues)
            raise
        self._loaded.pop(model_id, None)
        self._consumer.call_soon(self.resize_pool, -self._num_jobs.pop(model_id, 0))


def _num_held(queues: Sequence[str]) -> int:
    """Return how many jobs of these queues this worker has taken and not ended."""
    return sum(request.delivery_info.get("routing_key") in queues for request in list(state.requests.values()))
