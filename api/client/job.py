"""A submitted job, as the client that submitted it gives it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, cast

from typing_extensions import TypeVar

from cellama.tasks.contract.events import Event
from cellama.tasks.contract.shapes.results import Result
from cellama.tasks.estimates.position import Position
from cellama.tasks.state.reader import STREAM_TIMEOUT_S

from .core import Core

R = TypeVar("R", covariant=True, default=Result)


class Job(Generic[R]):
    """A submitted job; `R` is the type of its result."""

    def __init__(self, core: Core, job_id: str) -> None:
        self.id = job_id
        self._core = core

    def result(self, timeout: float | None = None) -> R:
        """The result. Raises JobFailed, JobCancelled, or JobTimeout after `timeout` seconds (the job goes on)."""
        return cast(R, self._core.result(self.id, timeout))

    def stream(
        self,
        after: int = -1,
        timeout: float = STREAM_TIMEOUT_S,
        *,
        ping: float = math.inf,
        cancel_on_exit: bool = False,
    ) -> Iterator[Event]:
        """Its events (see Client.stream)."""
        return self._core.stream(self.id, after, timeout, ping, cancel_on_exit)

    def position(self) -> Position:
        """Whether it waits, runs or is done, and how many jobs are before it."""
        return self._core.position(self.id)

    def cancel(self) -> None:
        """Ends the job wherever it is; its slot is free within one step."""
        self._core.cancel(self.id)
