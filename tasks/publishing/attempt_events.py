"""The events of one attempt on their way to Redis: numbered, and gathered if the job does not stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from cellama.tasks.broker.celery_ends import CeleryEnd
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import Event, Foundation, OutputEvent, numbered
from cellama.tasks.state.history import outputs_of_line
from cellama.tasks.state.records import Attempt, Contexts, Entry

from .signing import Signer

STRIDE = 8  # tokens per event of a job that does not stream


class HandBack(TypedDict):
    """Between the publisher and itself: nothing more of this run is written."""

    type: Literal["hand_back"]


class Fail(TypedDict):
    """Between the publisher and itself: the run ends with this failure."""

    type: Literal["fail"]
    failure: JobFailed


Order = Event | HandBack | Fail


@dataclass(slots=True)
class RunEvents:
    """What the publisher knows of an attempt. Its thread only, but for what is said of events before they come."""

    attempt: Attempt
    next_seq: int
    streams: bool
    started: bool
    on_token: Callable[[], None]
    celery_end: CeleryEnd | None = None
    on_line: Callable[[int], None] = lambda line: None
    closed: bool = False  # no more events are taken
    details: Foundation = field(default_factory=lambda: Foundation())  # more for its `started`
    signers: dict[str, Signer] = field(default_factory=dict)  # of its request, or of a chunk's lines
    failure: JobFailed | None = None  # that ended it here, whatever the engine goes on to tell
    ended: Future[bool] = field(default_factory=Future)
    _last_result: Result | None = None  # that Celery has with the last event
    _gathered: dict[int, list[OutputEvent]] = field(default_factory=dict)  # of a job that does not stream, by index

    def entry(self, event: Event, result: Result | None = None, contexts: Contexts = ()) -> Entry:
        """The event with the next number. Raises what it means that it can't be written; the number stays free then."""
        stored = self.celery_end.stored(result) if result is not None and self.celery_end is not None else None
        entry = Entry(
            job_id=self.attempt.job_id,
            run=self.attempt.run,
            event=numbered(event, self.next_seq),
            result=result if stored is None else None,
            stored=stored,
            token="" if stored is None or self.celery_end is None else self.celery_end.token,
            contexts=contexts,
        )
        if stored is not None:
            self._last_result = result
        self.next_seq += 1
        return entry

    def end(self) -> None:
        """Its last event is in Redis."""
        if self.celery_end is not None:
            self.celery_end.result = self._last_result
        if self.failure is None:
            self.ended.set_result(True)
        else:
            self.ended.set_exception(self.failure)

    def gather(self, event: OutputEvent) -> Iterator[OutputEvent]:
        """The event to write instead of this one and those before, if there are enough tokens.

        An event without tokens goes at once: those that its text comes from are told, and they would not be told again.
        """
        index = event.get("index", 0)
        if index in self._gathered and self._gathered[index][0]["type"] != event["type"]:
            yield self._join(index)
        gathered = self._gathered.setdefault(index, [])
        gathered.append(event)
        if not event["tokens"] or sum(len(each["tokens"]) for each in gathered) >= STRIDE:
            yield self._join(index)

    def forget(self, line: int) -> None:
        """Drops what is gathered of a line that has ended: its result says it all."""
        for index in outputs_of_line(line):
            self._gathered.pop(index, None)

    def rest(self) -> Iterator[OutputEvent]:
        """What is still gathered."""
        for index in list(self._gathered):
            yield self._join(index)

    def _join(self, index: int) -> OutputEvent:
        parts = self._gathered.pop(index)
        joined = parts[0].copy()
        joined["tokens"] = [token for part in parts for token in part["tokens"]]
        if joined["type"] != "reasoning_end":
            joined["text"] = "".join(part["text"] for part in parts if part["type"] != "reasoning_end")
        if "logprobs" in joined:
            joined["logprobs"] = [entry for part in parts for entry in part.get("logprobs", [])]
        if "mirostat_mu" in parts[-1]:
            joined["mirostat_mu"] = parts[-1]["mirostat_mu"]
        return joined
