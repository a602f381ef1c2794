"""What engines tell of their steps and requests: for a hook of the deployment, and as lines of JSON in the log.

An engine only puts an event down. A thread of its own gathers them and calls the hook, so that one which is slow, hangs
or fails costs events, and no token.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, cast

from cellama.config.logging import json_lines
from cellama.engine import Engine, InvalidRequest, RequestStats, StepStats

log = logging.getLogger(__name__)

MOST_WAITING = 10_000  # events; what comes on top of these is lost
GATHER_S = 0.05  # between two looks while events come: waking up for each would take the GIL from the engines
CLOSE_S = 2.0  # for the hook to take what is left
DIGITS = 3  # of numbers in lines

Stats = StepStats | RequestStats
Hook = Callable[[Stats], None]
Logged = Literal["off", "requests", "steps"]


def hook_of(path: str) -> Hook:
    """The function of an import path `package.module:name`, or an object of that class. Raises InvalidRequest."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        hook: Any = found() if inspect.isclass(found) else found
    except Exception as error:  # of code that is not ours
        raise InvalidRequest(f"telemetry_hook {path!r} can't be used: {type(error).__name__}: {error}") from None
    if not callable(hook):
        raise InvalidRequest(f"telemetry_hook {path!r} can't be called; name a function, or a class with __call__")
    return cast(Hook, hook)


class Relay:
    """Takes the telemetry of engines to a hook, and to the log. Without either there is no thread."""

    def __init__(self, worker: str, hook: Hook | str | None, logged: Logged = "off") -> None:
        """The hook may be an import path. `logged` are requests, or steps as well. Raises InvalidRequest."""
        self._worker = worker
        self._hook = hook_of(hook) if isinstance(hook, str) else hook
        self._logged = {"off": (), "requests": (RequestStats,), "steps": (RequestStats, StepStats)}[logged]
        self._wants_steps = hook is not None or logged == "steps"
        self._lines = json_lines() if self._logged else None
        self._events: deque[Stats] = deque()
        self._due = threading.Event()
        self._closing = threading.Event()
        self.num_dropped = self.num_failed = 0
        self._thread: threading.Thread | None = None
        if hook is not None or self._logged:
            self._thread = threading.Thread(target=self._run, name="cellama-telemetry", daemon=True)
            self._thread.start()

    def watch(self, engine: Engine) -> None:
        """The events of this engine are told from now on."""
        if self._thread is not None:
            engine.add_request_listener(self._take)
        if self._wants_steps:
            engine.add_step_listener(self._take)

    def close(self) -> None:
        """Tells what is left, as far as the hook takes it in time; says how many events it did not get."""
        self._closing.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self.num_dropped or self.num_failed or self._events:
            lost = self.num_dropped + len(self._events)
            log.warning("telemetry: %d events were lost, and the hook failed for %d", lost, self.num_failed)

    def _take(self, stats: Stats) -> None:
        """On an engine's thread."""
        if len(self._events) < MOST_WAITING:
            self._events.append(stats)
            if not self._due.is_set():
                self._due.set()
            return
        self.num_dropped += 1
        if self.num_dropped == 1:
            log.warning("the telemetry hook is too slow: events are lost from now on, requests are not affected")

    # The telemetry thread

    def _run(self) -> None:
        closing = False
        while not closing:
            self._due.wait()
            closing = self._closing.wait(GATHER_S)  # before the look: no event comes after that
            self._due.clear()
            while self._events:
                self._pass_on(replace(self._events.popleft(), worker=self._worker))

    def _pass_on(self, stats: Stats) -> None:
        try:
            if self._hook is not None:
                self._hook(stats)
        except BaseException:  # other people's code; this thread has nothing that it could leave half done
            self.num_failed += 1
            if self.num_failed == 1:
                log.exception("the telemetry hook failed; it is called again, and told of at the end only")
        if self._lines is not None and isinstance(stats, self._logged):
            self._lines.info(as_json(stats))


def as_json(stats: Stats) -> str:
    """One line: `event` is "step" or "request", the other fields are those of the event."""
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    rounded = {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in values.items()}
    return json.dumps({"event": "step" if isinstance(stats, StepStats) else "request", **rounded})
