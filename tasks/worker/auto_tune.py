"""Tune models while the worker is idle, as `cellama tune` does.

The measurements run in a process of their own, which is killed as soon as a job starts or waits. The next load of the
model uses the result. A running model keeps its options, because another number of slots needs a new context, and
creating one would drop the cache and delay jobs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from cellama.config import ModelSettings
from cellama.config.logging import event_logger
from cellama.engine import EngineOptions, HubOptions
from cellama.engine.models import tuned_options
from cellama.tasks.connection.redis_waits import RedisLoop

log = event_logger(__name__)

IDLE_S = 5.0  # seconds without a job before measurements start, so that short pauses between jobs are not used
PERIOD_S = 1.0  # seconds between two checks whether the worker is idle
POLL_S = 0.01  # seconds between two checks whether a job has started, which are the longest delay for the job
QUEUE_POLL_S = 0.5  # seconds between two checks whether a job waits in Redis
SWEEP_SHARE = 0.8  # share of the time for measurements; the rest is for loading the weights
MIN_TRY_S = 10.0  # seconds that must be left for another try after an interruption
# Options besides those in `tuned_options.SAME_OPTIONS` that the measurements use
_USED = ("n_batch", "chunk_size", "batch_strategy", "pooling", "kv_overrides", "use_mmap", "use_mlock")


class AutoTuner:
    """Tunes each loaded model that has no result for this machine. `start` starts the thread."""

    def __init__(
        self,
        budget_s: float,
        *,
        models: Callable[[], Mapping[str, tuple[ModelSettings, EngineOptions, str]]],
        is_running: Callable[[], bool],
        is_waiting: Callable[[], bool],
        memory: Callable[[], int | str],
    ) -> None:
        """Prepare the thread.

        `budget_s` is the time in seconds for each model. `models` returns the settings, options and fingerprints of the
        loaded models. `is_running` returns whether a job runs, and `is_waiting` returns whether a job waits in Redis.
        `memory` returns the memory budget for measurements, as in the settings.
        """
        self._budget_s = budget_s
        self._models = models
        self._is_running = is_running
        self._is_waiting = is_waiting
        self._memory = memory
        self._left_s: dict[str, float] = {}  # seconds, by fingerprint
        self._idle_since: float | None = None
        self._is_closing = threading.Event()
        self._loop = RedisLoop("auto-tune", self.run_once, PERIOD_S)

    def start(self) -> None:
        self._loop.start()

    def close(self, timeout_s: float) -> None:
        """End the measurements and the thread."""
        self._is_closing.set()
        self._loop.close(timeout_s)

    def run_once(self) -> None:
        """Tune one model if the worker has been idle for IDLE_S. Raises RedisError."""
        if self._is_running() or self._is_waiting():
            self._idle_since = None
            return
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        if now - self._idle_since < IDLE_S:
            return
        for model_id, (model, options, fingerprint) in self._models().items():
            left_s = self._left_s.setdefault(fingerprint, self._budget_s)
            if left_s < min(MIN_TRY_S, self._budget_s) or not tuned_options.lacks_result(options, fingerprint):
                continue
            with _alone_on_machine() as is_alone:
                if is_alone:
                    self._tune(model_id, model, options, fingerprint)
            return

    def _tune(self, model_id: str, model: ModelSettings, options: EngineOptions, fingerprint: str) -> None:
        budget_s, started = self._left_s[fingerprint], time.monotonic()
        self._left_s[fingerprint] = 0.0  # a failure is not retried
        log.info("tuning started", model=model_id, detail=f"the worker is idle; at most {budget_s:.0f} s")
        with subprocess.Popen(
            [sys.executable, "-m", "cellama.engine.tuning"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with process.stdin as request:
                    request.write(json.dumps(_request(model, options, SWEEP_SHARE * budget_s, self._memory())))
                is_interrupted = self._watch(process, started + budget_s)
            finally:
                process.kill()
            output = process.stdout.read()
        took_s = time.monotonic() - started
        if is_interrupted:
            self._left_s[fingerprint], self._idle_since = budget_s - took_s, None
            log.info("tuning interrupted", model=model_id, detail=f"a job arrived after {took_s:.1f} s")
            return
        _report(model_id, output, took_s)

    def _watch(self, process: subprocess.Popen[str], until: float) -> bool:
        """Wait until the process exits or its time is over. Return True if a job arrives or the worker stops."""
        next_look = 0.0
        while process.poll() is None and time.monotonic() < until:
            if self._is_running() or self._is_closing.wait(POLL_S):
                return True
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + QUEUE_POLL_S
                if self._is_waiting():
                    return True
        return False


def _request(model: ModelSettings, options: EngineOptions, seconds: float, memory: int | str) -> dict[str, Any]:
    """Return the input of the measuring process (engine/tuning/__main__.py). Nothing is downloaded."""
    return {
        "source": model.source,
        "options": {name: getattr(options, name) for name in (*tuned_options.SAME_OPTIONS, *_USED)},
        "capabilities": model.capabilities,
        "hub": asdict(HubOptions(model.hub_cache_dir, model.hub_token, offline=True)),
        "seconds": seconds,
        "memory": memory,
    }


def _report(model_id: str, output: str, took_s: float) -> None:
    lines = output.splitlines()
    last: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        last = json.loads(lines[-1]) if lines else {}
    result = last.get("result")
    if result is None or result["problem"]:
        reason = last.get("error") or (result and result["problem"]) or "the measurements took too long"
        log.warning("model not tuned", model=model_id, detail=f"{reason}; the model keeps its default options")
        return
    setup = {name: value for name, value in result["chosen"]["setup"].items() if value is not None}
    chosen = ", ".join(f"{name} {value}" for name, value in setup.items())
    detail = f"{chosen}, found in {took_s:.0f} s; the next load of the model uses these values"
    log.info("model tuned", model=model_id, detail=detail)


@contextlib.contextmanager
def _alone_on_machine() -> Iterator[bool]:
    """Yield whether no other worker of this machine and user tunes a model, and keep other workers from starting."""
    folder = tuned_options.directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
    except OSError:  # another worker holds the lock, or the directory is read-only
        yield False
