"""A request as its caller sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Literal, TypeVar

from cellama.engine.backend import AdapterSet
from cellama.engine.events import Completion, Event, Finished
from cellama.engine.kvstore.states import StateMatch
from cellama.engine.request import Request

log = logging.getLogger(__name__)

T = TypeVar("T")
CancelReason = Literal["cancelled", "timeout"]


class Handle:
    """Waits for, watches or cancels one request. Any thread may use it."""

    def __init__(
        self,
        request: Request,
        cancel: Callable[[Handle, CancelReason], None],
        on_event: Callable[[Event], None] | None,
        adapters: AdapterSet = (),
        plan: Any = None,
    ) -> None:
        """`adapters` are those that the request keeps to its end, `plan` is what its samplers are made from."""
        self.request = request
        self.taken_at = time.monotonic()
        self.adapters = adapters
        self.plan = plan
        self.match: StateMatch | None = None  # a file of states that has the beginning of its prompt
        self.future: Future[Completion] = Future()
        self.future.set_running_or_notify_cancel()  # so only the engine ends it: see `cancel`
        self._cancel = cancel
        self._on_event = on_event

    def result(self, timeout_s: float | None = None) -> Completion:
        """The completion. Raises the request's EngineError, or TimeoutError after `timeout_s` (it goes on then)."""
        return self.future.result(timeout_s)

    def cancel(self, reason: CancelReason = "cancelled") -> None:
        """Asks the engine to end the request for this reason, at the next step. Idempotent."""
        self._cancel(self, reason)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Calls back at the end of the request, on the engine thread, or at once if it ended already."""
        self.future.add_done_callback(lambda _: callback(self))

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whichever way."""
        return self.future.done()

    def deliver(self, event: Event) -> None:
        """Hands one event over. Engine thread only."""
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:  # other people's code, on the engine thread
                log.exception("the event callback of request %s failed and is not called again", self.request.id)
                self._on_event = None
        if isinstance(event, Finished):
            if event.error is not None:
                self.future.set_exception(event.error)
            elif event.completion is not None:
                self.future.set_result(event.completion)


class EngineCall(Generic[T]):
    """Something that the engine thread does between two steps, for a thread that waits for it."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._action = action
        self.future: Future[T] = Future()

    def run(self) -> None:
        """Engine thread."""
        if not self.future.set_running_or_notify_cancel():
            return  # the other thread waits no more
        try:
            self.future.set_result(self._action())
        except Exception as error:  # the boundary between the engine and one call
            self.future.set_exception(error)
