"""The events of one attempt on their way to Redis: numbered, and gathered if the job does not stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from cellama.tasks.broker.celery_ends import CeleryEnd
from cellama.tasks.broker.pool import JobControl
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import Event, OutputEvent, ProvenanceFields, is_output, is_terminal, numbered
from cellama.tasks.state.history import outputs_of_line
from cellama.tasks.state.records import Attempt, Contexts, Entry

STRIDE = 8  # tokens per event of a job that does not stream: an eighth of the events, and at most 7 tokens to repeat


@dataclass(frozen=True, slots=True)
class Publication:
    """What the publisher's thread has to do for an attempt: write an event, or with neither event nor failure write
    what is gathered and nothing more."""

    run_id: str
    event: Event | None = None  # without its `seq`
    result: Result | None = None  # with the end of a job that ends well
    contexts: Contexts = ()  # with the end of a job
    failure: JobFailed | None = None  # instead of an event: the attempt ends with this one

    @property
    def is_last(self) -> bool:
        """Whether nothing more of the attempt is written after this."""
        return self.event is None or is_terminal(self.event)


@dataclass(slots=True)
class AttemptStream:
    """One attempt's events. Other threads publish, and set what is said of events before they come; the rest belongs to
    the publisher's thread."""

    attempt: Attempt
    control: JobControl  # interrupts the attempt if its events can't be written
    send: Callable[[Publication], None]  # to the publisher's thread
    streams: bool
    started: bool  # an earlier attempt has written `started`
    on_token: Callable[[], None]
    celery_end: CeleryEnd | None
    sign: dict[str, Callable[[str], str]]  # signs reasoning of the request, or by line of a bulk run
    details: ProvenanceFields = field(default_factory=lambda: ProvenanceFields())  # more for its `started`
    on_line: Callable[[int], None] = lambda line: None  # called when the end of a line is in Redis
    # Whether its terminal event counts. Raises JobFailed if an event could not be written, which ended the attempt.
    ended: Future[bool] = field(default_factory=Future)
    closed: bool = False  # no more events are taken
    failure: JobFailed | None = None  # that ended it here, whatever the engine reports afterwards
    _next_seq: int = field(init=False)
    _celery_result: Result | None = None  # that Celery has with the last event
    _gathered: dict[int, list[OutputEvent]] = field(default_factory=dict)  # of a job that does not stream, by index

    def __post_init__(self) -> None:
        self._next_seq = self.attempt.next_seq

    # For other threads

    def publish(self, event: Event, result: Result | None = None) -> None:
        """Publish an event that the engine does not report."""
        self.send(Publication(self.attempt.run_id, event, result))

    def hand_back(self) -> None:
        """Write what is gathered, and nothing more of this attempt. `ended` is False then."""
        self.send(Publication(self.attempt.run_id))

    # For the publisher's thread

    def signer(self, line: str) -> Callable[[str], str]:
        """Signs the reasoning of a request. Without a middleware that signs, signatures are empty."""
        return self.sign.get(line, unsigned)

    def to_write(self, event: Event) -> Iterator[Event]:
        """The events to write now that this one has come: none yet, or several."""
        if is_output(event) and not self.streams:
            yield from self._gather(event)
        elif event["type"] == "started":
            if not self.started:
                yield {**event, **self.details}
        else:
            if event["type"] == "line":
                self._forget(event["line"])
            yield event

    def entry(self, event: Event, result: Result | None = None, contexts: Contexts = ()) -> Entry:
        """The event with the next number. Raises if it can't be written; the number stays free then."""
        stored = self.celery_end.stored(result) if result is not None and self.celery_end is not None else None
        entry = Entry(
            job_id=self.attempt.job_id,
            run=self.attempt.run,
            event=numbered(event, self._next_seq),
            result=result if stored is None else None,
            stored=stored,
            token="" if stored is None or self.celery_end is None else self.celery_end.token,
            contexts=contexts,
        )
        if stored is not None:
            self._celery_result = result
        self._next_seq += 1
        return entry

    def end(self) -> None:
        """Its last event is in Redis."""
        if self.celery_end is not None:
            self.celery_end.result = self._celery_result
        if self.failure is None:
            self.ended.set_result(True)
        else:
            self.ended.set_exception(self.failure)

    def rest(self) -> Iterator[OutputEvent]:
        """What is still gathered."""
        for index in list(self._gathered):
            yield self._join(index)

    def _gather(self, event: OutputEvent) -> Iterator[OutputEvent]:
        """The event to write instead of this one and those before, if there are enough tokens.

        An event without tokens is written now: its text comes from tokens that are written already.
        """
        index = event.get("index", 0)
        if index in self._gathered and self._gathered[index][0]["type"] != event["type"]:
            yield self._join(index)
        gathered = self._gathered.setdefault(index, [])
        gathered.append(event)
        if not event["tokens"] or sum(len(each["tokens"]) for each in gathered) >= STRIDE:
            yield self._join(index)

    def _forget(self, line: int) -> None:
        """Drop what is gathered of a line that has ended: its result has all of it."""
        for index in outputs_of_line(line):
            self._gathered.pop(index, None)

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


def unsigned(text: str) -> str:
    """The signature of reasoning that no middleware signs."""
    return ""
