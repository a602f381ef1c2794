"""Publish the events of attempts. All events of one engine step are written in a single call to Redis.

The publisher thread serves all attempts of the worker. An event that can't be written ends only its own attempt. An
error that can't be attributed to an attempt ends the worker process, so that the worker's jobs resume on other workers
instead of waiting forever. Redis accepts only events of a job's current attempt.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from cellama.config.logging import event_logger
from cellama.engine import Finished, Pulse
from cellama.tasks.broker.pool import Interruption, JobControl
from cellama.tasks.broker.result_backend import CeleryEnd
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract import events
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import (
    Event,
    LineEvent,
    OutputEvent,
    ProvenanceFields,
    is_output,
    is_terminal,
    numbered,
)
from cellama.tasks.contract.fairness import cost_of
from cellama.tasks.contract.journal import EventPacker
from cellama.tasks.middleware import Middlewares
from cellama.tasks.state.history import outputs_of_line
from cellama.tasks.state.ledger import Attempt, Contexts, Entry, Ledger

from .results import contexts_of, error_event, error_of, event_of, line_event_of, replies_of, result_of_end

if TYPE_CHECKING:
    from cellama.engine import Event as EngineEvent

log = event_logger(__name__)

STRIDE = 8  # tokens per event of a job that does not stream; a resumed job recomputes at most 7 tokens
RETRY_S = 0.5  # seconds between two writes while Redis does not accept them
MAX_CLOSING_WRITES = 4  # failed writes after `hurry`, which take 2 s of the time that a stopping worker has
LINE_MARK = "\x1f"  # separates the run id of a chunk from the index of a line in the id of a request
MAX_BATCH = 1000  # events per call of Redis, which serves no other client for some milliseconds meanwhile
MAX_BATCH_BYTES = 8 << 20  # bytes of events per call, for the same reason; a larger event is written alone
Reply = tuple[Mapping[str, Any], str]  # a chat's message, and the finish_key of its context
RunEntry = tuple[str, Entry]  # run id, and an entry of its journal


@dataclass(frozen=True, slots=True)
class Publication:
    """An event of an attempt, or the failure that ends the attempt.

    If neither is set, the attempt is handed back: the gathered tokens are written, but nothing after them.
    """

    run_id: str
    event: Event | None = None  # without its `seq`
    result: Result | None = None  # with the last event of a job that succeeds
    contexts: Contexts = ()  # with the last event of a job
    failure: JobFailed | None = None  # instead of an event

    @property
    def is_last(self) -> bool:
        """Return whether this is the last publication of its attempt."""
        return self.event is None or is_terminal(self.event)


@dataclass(slots=True)
class AttemptStream:
    """Numbers the events of one attempt, and gathers them if the job does not stream.

    Other threads call `publish` and `hand_back`, and set `details`, `sign`, `on_line` and `records_of` before events
    arrive. All other methods and attributes belong to the publisher thread.
    """

    attempt: Attempt
    control: JobControl  # interrupts the attempt if its events can't be written
    send: Callable[[Publication], None]  # passes a publication to the publisher thread
    streams: bool  # whether each token is an event
    started: bool  # whether an earlier attempt has written `started`
    on_token: Callable[[], None]  # called when a token is in Redis
    celery_end: CeleryEnd | None
    sign: dict[str, Callable[[str], str]]  # functions that sign reasoning, by line of a bulk run, or "" without lines
    details: ProvenanceFields = field(default_factory=lambda: ProvenanceFields())  # fields to add to `started`
    on_line: Callable[[int], None] = lambda line: None  # called when the end of a line is in Redis
    # Returns the records that are stored with the last event, in addition to contexts.
    records_of: Callable[[Sequence[Reply]], Sequence[tuple[str, bytes]]] | None = None
    # Resolves to whether the attempt has ended the job, or to the JobFailed of an event that could not be written.
    ended: Future[bool] = field(default_factory=Future)
    closed: bool = False  # whether further events are dropped
    failure: JobFailed | None = None  # error of an event that could not be written; later events are ignored
    _next_seq: int = field(init=False)
    _cost_of_lines: float = 0.0  # in tokens (contract/fairness.py)
    _packer: EventPacker | None = None  # None if an earlier attempt has written events
    _celery_result: Result | None = None  # result that is stored for Celery with the last event
    _gathered: dict[int, list[OutputEvent]] = field(default_factory=dict)  # by index of the completion

    def __post_init__(self) -> None:
        self._next_seq = self.attempt.next_seq
        self._packer = EventPacker() if self._next_seq == 0 else None

    # For other threads

    def publish(self, event: Event, result: Result | None = None) -> None:
        """Publish an event that the engine does not report."""
        self.send(Publication(self.attempt.run_id, event, result))

    def hand_back(self) -> None:
        """Write the gathered tokens, but nothing after them. `ended` resolves to False."""
        self.send(Publication(self.attempt.run_id))

    # For the publisher thread

    def signer(self, line: str) -> Callable[[str], str]:
        """Return the function that signs the reasoning of a request, which by default returns empty signatures."""
        return self.sign.get(line, unsigned)

    def to_write(self, event: Event) -> Iterator[Event]:
        """Yield the events that must be written when this event arrives.

        If the event is only gathered, nothing is yielded.
        """
        if is_output(event) and not self.streams:
            yield from self._gather(event)
        elif event["type"] == "started":
            if not self.started:
                yield {**event, **self.details}
        else:
            if event["type"] == "line":
                self._drop_gathered(event["line"])
            yield event

    def entry(self, event: Event, result: Result | None = None, contexts: Contexts = ()) -> Entry:
        """Add the next number to an event, and return its entry. If encoding fails, the number remains unused."""
        if event["type"] == "line":
            outcome: Any = event
            self._cost_of_lines += cost_of(outcome.get("result", {}).get("usage", {}))
        stored = self.celery_end.stored(result) if result is not None and self.celery_end is not None else None
        entry = Entry(
            job_id=self.attempt.job_id,
            run=self.attempt.run,
            event=numbered(event, self._next_seq),
            result=result if stored is None else None,
            stored=stored,
            token="" if stored is None or self.celery_end is None else self.celery_end.token,
            contexts=contexts,
            cost_of_lines=self._cost_of_lines,
            packed=self._packer.packed() if self._packer is not None and is_terminal(event) else b"",
        )
        if self._packer is not None:
            self._packer.add(event)
        if stored is not None:
            self._celery_result = result
        self._next_seq += 1
        return entry

    def end(self) -> None:
        """Resolve `ended`, because the last event is in Redis."""
        if self.celery_end is not None:
            self.celery_end.result = self._celery_result
        if self.failure is None:
            self.ended.set_result(True)
        else:
            self.ended.set_exception(self.failure)

    def rest(self) -> Iterator[OutputEvent]:
        """Yield the remaining gathered events."""
        for index in list(self._gathered):
            yield self._join(index)

    def _gather(self, event: OutputEvent) -> Iterator[OutputEvent]:
        """Gather an event, and yield the joined events that are complete.

        An event without tokens completes the gathered events, because its text belongs to earlier tokens.
        """
        index = event.get("index", 0)
        if index in self._gathered and self._gathered[index][0]["type"] != event["type"]:
            yield self._join(index)
        gathered = self._gathered.setdefault(index, [])
        gathered.append(event)
        if not event["tokens"] or sum(len(each["tokens"]) for each in gathered) >= STRIDE:
            yield self._join(index)

    def _drop_gathered(self, line: int) -> None:
        """Drop the gathered events of a line that has ended, because its result contains them."""
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
        if joined["type"] == "token":
            deltas = [d for part in parts if part["type"] == "token" for d in part.get("tool_call_deltas", ())]
            if deltas:
                joined["tool_call_deltas"] = deltas
        if "mirostat_mu" in parts[-1]:
            joined["mirostat_mu"] = parts[-1]["mirostat_mu"]
        return joined


def unsigned(text: str) -> str:
    """Return an empty signature, for workers without a middleware that signs reasoning."""
    return ""


class Publisher:
    """Numbers, journals and publishes the events of all attempts of a worker."""

    def __init__(
        self,
        ledger: Ledger,
        worker: str,
        middlewares: Middlewares,
        on_cost: Callable[[str, float], None] = lambda key, tokens: None,
    ) -> None:
        """Start the publisher thread.

        This thread calls `on_cost` with the fairness key and the cost of each ended job.
        """
        self._ledger = ledger
        self._on_cost = on_cost
        self._worker = worker
        self._middlewares = middlewares
        self.pulse = Pulse("cellama-publisher")
        self._streams: dict[str, AttemptStream] = {}
        self._inbox: queue.SimpleQueue[Callable[[], list[Publication]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=self.pulse.name, daemon=True)
        self._thread.start()

    # For other threads

    def open(
        self,
        attempt: Attempt,
        control: JobControl,
        *,
        streams: bool = True,
        started: bool = False,
        on_token: Callable[[], None] = lambda: None,
        celery_end: CeleryEnd | None = None,
        sign: dict[str, Callable[[str], str]] | None = None,
    ) -> AttemptStream:
        """Start accepting the events of an attempt.

        `control` is interrupted if the job has another attempt or has ended, if an event can't be written, or if Redis
        has lost the last events. If Redis has lost events, the job must resume from its journal. The publisher thread
        calls `on_token` for each event with tokens, once the event is in Redis.
        """
        stream = AttemptStream(
            attempt=attempt,
            control=control,
            send=lambda publication: self._inbox.put(lambda: [publication]),
            streams=streams,
            started=started,
            on_token=on_token,
            celery_end=celery_end,
            sign={} if sign is None else sign,
        )
        self._streams[attempt.run_id] = stream
        return stream

    def listener(self, model_id: str) -> Callable[[tuple[EngineEvent, ...]], None]:
        """Return a listener, which an engine calls once per step. The publisher thread converts the events."""
        return lambda engine_events: self._inbox.put(
            lambda: [each for event in engine_events if (each := self._convert(model_id, event)) is not None]
        )

    def hurry(self) -> None:
        """Limit failed writes to `MAX_CLOSING_WRITES`, because the worker is stopping.

        Other workers resume the jobs of this worker.
        """
        self._closing.set()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write the remaining events and stop the thread. Return whether the thread stopped within the timeout."""
        self.hurry()
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The publisher thread

    def _work(self) -> None:
        try:
            while self._take(self._inbox.get()):
                self.pulse.rest()
            self.pulse.close()
        except Exception as error:
            log.critical("publisher failed", exc_info=True, detail="this worker exits; other workers resume its jobs")
            self.pulse.die(f"{type(error).__name__}: {error}")

    def _take(self, make: Callable[[], list[Publication]] | None) -> bool:
        """Publish this item and all later items that have arrived in the inbox. Return False after the last item."""
        publications: list[Publication] = []
        while make is not None:
            self.pulse.beat("events", self._streams.keys())
            publications += make()
            if self._inbox.empty() or len(publications) >= MAX_BATCH:  # so that no batch grows while Redis is slow
                break
            make = self._inbox.get()
        self._publish(publications)
        return make is not None

    def _convert(self, model_id: str, event: EngineEvent) -> Publication | None:
        """Convert an engine's event, or return the failure of its attempt or line if the conversion fails.

        Return None if the contract has no corresponding event.
        """
        run_id, mark, line = event.request_id.partition(LINE_MARK)
        if isinstance(event, Finished):
            self._middlewares.after_request(run_id, model_id, event)
        stream = self._streams.get(run_id)
        job_id = "" if stream is None else stream.attempt.job_id
        sign = unsigned if stream is None else stream.signer(line)
        try:
            if mark:
                line_event = line_event_of(event, int(line), model_id, sign, job_id)
                return None if line_event is None else Publication(run_id, line_event)
            fingerprint = "" if stream is None else stream.details.get("fingerprint", "")
            return Publication(
                run_id,
                event_of(event, model_id, self._worker, sign, job_id),
                result=result_of_end(event, model_id, sign, job_id),
                contexts=contexts_of(event, fingerprint) + self._records_of(stream, event, job_id),
            )
        except Exception as error:
            failure = _failure_of(run_id, error)
            if mark:
                return Publication(run_id, _line_failed(int(line), failure))
            return Publication(run_id, failure=failure)

    def _records_of(self, stream: AttemptStream | None, event: EngineEvent, job_id: str) -> Contexts:
        """Return the records for later turns of a chat.

        If creating them fails, later turns are slower, but the job continues.
        """
        if stream is None or stream.records_of is None or not isinstance(event, Finished):
            return ()
        try:
            return tuple(stream.records_of(replies_of(event, job_id)))
        except Exception as error:
            log.error("reply not recorded for later turns", run=stream.attempt.run_id, exc_info=error)
            return ()

    def _publish(self, publications: list[Publication]) -> None:
        for page in _pages([entry for each in publications for entry in self._entries_of(each)]):
            self._write(page)
        for each in publications:
            if each.event is None and each.failure is None:  # handed back
                stream = self._streams.pop(each.run_id, None)
                if stream is not None:
                    stream.ended.set_result(False)

    def _entries_of(self, publication: Publication) -> list[RunEntry]:
        """Return the entries to write. If the event can't be encoded, an entry with the failure replaces it."""
        stream = self._streams.get(publication.run_id)
        if stream is None or stream.closed:
            return []  # the attempt was superseded or handed back, or has failed
        event, entries = publication.event, []
        try:
            if publication.is_last:
                stream.closed = True
                for gathered in stream.rest():
                    entries.append(stream.entry(gathered))
            if publication.failure is not None:
                raise publication.failure
            for each in () if event is None else stream.to_write(event):
                if publication.is_last:
                    entries.append(stream.entry(each, publication.result, publication.contexts))
                else:
                    entries.append(stream.entry(each))
        except Exception as error:
            failure = _failure_of(publication.run_id, error)
            if event is not None and event["type"] == "line":
                entries.append(stream.entry(_line_failed(event["line"], failure)))
            else:
                stream.closed, stream.failure = True, failure
                entries.append(stream.entry(error_event(failure)))
        return [(publication.run_id, entry) for entry in entries]

    def _write(self, entries: list[RunEntry]) -> None:
        """Write entries, and retry until Redis accepts them. Entries have ids, so writing them twice is harmless."""
        num_closing_writes = 0
        with redis_waits.of("the publisher of events") as waits:
            while entries and num_closing_writes < MAX_CLOSING_WRITES:
                try:
                    self.pulse.rest()  # the watchdog must not count the time that Redis takes
                    superseded, gaps = self._ledger.write([entry for _, entry in entries])
                    self.pulse.beat("events", self._streams.keys())
                    return self._settle(entries, superseded, gaps)
                except RedisError as error:
                    if not is_passing(error):
                        return self._write_one_by_one(entries, error)
                    waits(error)
                num_closing_writes += self._closing.is_set()
                time.sleep(RETRY_S)
        if entries:
            log.error(
                "events not written to Redis",
                num_events=len(entries),
                detail="Redis did not accept the events before the worker stopped; other workers resume the jobs",
            )
            for run_id in {run_id for run_id, _ in entries}:
                self._abandon(run_id, Interruption.SUPERSEDED)
        return None

    def _write_one_by_one(self, entries: list[RunEntry], error: RedisError) -> None:
        """Write the entries separately, so that an event that Redis refuses ends only its own attempt."""
        if len(entries) == 1:
            log.error("event rejected by Redis", run=entries[0][0], detail=f"{error}; the attempt is abandoned")
            self._abandon(entries[0][0], Interruption.SUPERSEDED)
        else:
            for each in entries:
                self._write([each])

    def _settle(self, entries: list[RunEntry], superseded: set[int], gaps: set[int]) -> None:
        """Process the outcome of a write. Redis has refused the entries whose indices are in `superseded` or `gaps`."""
        for index, (run_id, entry) in enumerate(entries):
            stream = self._streams.get(run_id)
            if stream is None:
                continue
            if index in superseded:
                log.warning(
                    "attempt superseded", run=run_id, detail="another attempt has started, or the job has ended"
                )
                self._abandon(run_id, Interruption.SUPERSEDED)
            elif index in gaps:
                log.warning(
                    "gaps found in journal",
                    run=run_id,
                    detail="Redis lost events; the job resumes from the remaining events",
                )
                self._abandon(run_id, Interruption.HANDED_BACK)
            elif entry.event_class == "terminal":
                if entry.cost != "":
                    self._on_cost(stream.attempt.fairness_key, float(entry.cost))
                del self._streams[run_id]
                stream.end()  # before the interruption, after which the job's thread reads `ended`
                if stream.failure is not None:
                    stream.control.interrupt(Interruption.FAILED)
            elif entry.event_class == "progress":
                stream.on_token()
                if entry.event["type"] == "line":
                    stream.on_line(entry.event["line"])

    def _abandon(self, run_id: str, reason: Interruption) -> None:
        stream = self._streams.pop(run_id, None)
        if stream is not None:
            stream.control.interrupt(reason)  # before `ended`, after which the job's thread reads the reason
            stream.ended.set_result(False)


def _pages(entries: list[RunEntry]) -> Iterator[list[RunEntry]]:
    """Split entries into pages that each fit into one call to Redis."""
    page: list[RunEntry] = []
    num_bytes = 0
    for each in entries:
        if page and (len(page) == MAX_BATCH or num_bytes + each[1].num_bytes > MAX_BATCH_BYTES):
            yield page
            page, num_bytes = [], 0
        page.append(each)
        num_bytes += each[1].num_bytes
    if page:
        yield page


def _failure_of(run_id: str, error: Exception) -> JobFailed:
    if isinstance(error, JobFailed):
        return error
    log.error("event not encoded", run=run_id, exc_info=error)
    return JobFailed("internal_error", f"an event could not be written ({type(error).__name__}: {error})")


def _line_failed(line: int, failure: JobFailed) -> LineEvent:
    return events.line(line, {"error": error_of(failure)})
