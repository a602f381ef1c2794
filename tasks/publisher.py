"""The publisher thread: what engines tell in one step becomes one call of Redis, fenced by each run's attempt."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from .contract import events
from .contract.events import Event
from .ledger import Ledger
from .past import outputs_of_line
from .records import Attempt, Entry
from .signing import Signer

if TYPE_CHECKING:
    from cellama.engine import Event as EngineEvent

log = logging.getLogger(__name__)

RETRY_S = 0.5
CLOSING_ATTEMPTS = 4
LINE_MARK = "\x1f"  # in the id of a request: between the run of a chunk and the number of its line
HAND_BACK = "hand_back"  # between this class and itself: no event of a job
STRIDE = 8  # tokens per event of a job that does not stream
MAX_BATCH = 1000  # events per call of Redis: it serves nobody else meanwhile

Result = dict[str, Any]
Told = list[tuple[str, Event, Result | None]]  # run id, event without its seq, result with a terminal event


@dataclass(slots=True)
class _Run:
    """An attempt that writes events here."""

    attempt: Attempt
    next_seq: int
    streams: bool
    started: bool
    on_token: Callable[[], None]
    on_line: Callable[[int], None] = lambda line: None
    handed_back: bool = False
    ended: Future[bool] = field(default_factory=Future)
    gathered: dict[int, list[Event]] = field(default_factory=dict)  # of a job that does not stream, by index

    def number(self, event: Event) -> Event:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        return {"seq": seq, **event}

    def gather(self, event: Event) -> Iterator[Event]:
        """The event to write instead of this one and those before, if there are enough tokens.

        An event without tokens goes at once: those that its text comes from are told, and nobody would say it again.
        """
        index = event.get("index", 0)
        if index in self.gathered and self.gathered[index][0]["type"] != event["type"]:
            yield self._join(index)
        gathered = self.gathered.setdefault(index, [])
        gathered.append(event)
        if not event["tokens"] or sum(len(each["tokens"]) for each in gathered) >= STRIDE:
            yield self._join(index)

    def forget(self, line: int) -> None:
        """Drops what is gathered of a line that has ended: its result says it all."""
        for index in outputs_of_line(line):
            self.gathered.pop(index, None)

    def rest(self) -> Iterator[Event]:
        """What is still gathered."""
        for index in list(self.gathered):
            yield self._join(index)

    def _join(self, index: int) -> Event:
        parts = self.gathered.pop(index)
        joined = {**parts[0], "tokens": [token for part in parts for token in part["tokens"]]}
        if "text" in joined:
            joined["text"] = "".join(part["text"] for part in parts)
        if "logprobs" in joined:
            joined["logprobs"] = [entry for part in parts for entry in part["logprobs"]]
        return joined


class Publisher:
    """Numbers, journals and publishes the events of all runs of a worker. Owns the `seq` of each."""

    def __init__(self, ledger: Ledger, worker: str, on_void: Callable[[str], None], signer: Signer) -> None:
        """`on_void` is told, on this thread, the id of a run whose job has another attempt or an end already."""
        self._ledger = ledger
        self._worker = worker
        self._on_void = on_void
        self._signer = signer
        self._runs: dict[str, _Run] = {}
        self._inbox: queue.SimpleQueue[Callable[[], Told] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="cellama-publisher", daemon=True)
        self._thread.start()

    # For other threads

    def open(
        self,
        attempt: Attempt,
        next_seq: int = 0,
        *,
        streams: bool = True,
        started: bool = False,
        on_token: Callable[[], None] = lambda: None,
    ) -> Future[bool]:
        """Takes the events of a run from now on. The future tells whether its terminal event counts.

        `on_token` is called, on this thread, once its first token is in Redis.
        """
        run = _Run(attempt, next_seq, streams, started, on_token)

        def register() -> Told:
            self._runs[attempt.run_id] = run
            return []

        self._inbox.put(register)
        return run.ended

    def listener(self, model_id: str) -> Callable[[tuple[EngineEvent, ...]], None]:
        """What an engine calls once per step; the conversion is left to the publisher thread."""
        return lambda engine_events: self._inbox.put(lambda: self._convert(model_id, engine_events))

    def watch_lines(self, run_id: str, on_line: Callable[[int], None]) -> None:
        """Calls `on_line`, on this thread, with each line of a chunk whose end is in Redis."""

        def register() -> Told:
            if run_id in self._runs:
                self._runs[run_id].on_line = on_line
            return []

        self._inbox.put(register)

    def publish(self, run_id: str, event: Event, result: Result | None = None) -> None:
        """Publishes an event that no engine tells."""
        self._inbox.put(lambda: [(run_id, event, result)])

    def hand_back(self, run_id: str) -> None:
        """Writes what is gathered, and nothing more of this run. Its future says False then."""
        self._inbox.put(lambda: [(run_id, {"type": HAND_BACK}, None)])

    def close(self, timeout_s: float = 5.0) -> bool:
        """Writes what is there, then ends; False if Redis did not take it in time."""
        self._closing.set()
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _convert(self, model_id: str, engine_events: tuple[EngineEvent, ...]) -> Told:
        from .results import event_of, line_event_of, result_of_end

        told: Told = []
        for event in engine_events:
            run_id, mark, line = event.request_id.partition(LINE_MARK)
            if not mark:
                own = event_of(event, model_id, self._worker, self._signer)
                told.append((run_id, own, result_of_end(event, model_id, self._signer)))
            elif (of_line := line_event_of(event, int(line), model_id, self._signer)) is not None:
                told.append((run_id, of_line, None))
        return told

    # The publisher thread

    def _work(self) -> None:
        while (make := self._inbox.get()) is not None:
            told = make()
            while not self._inbox.empty() and len(told) < MAX_BATCH:  # a slow Redis must not make it slower still
                make = self._inbox.get()
                if make is None:
                    self._tell(told)
                    return
                told += make()
            self._tell(told)

    def _tell(self, told: Told) -> None:
        self._write([entry for each in told for entry in self._entries(*each)])
        for run_id, event, _ in told:
            if event["type"] == HAND_BACK and (run := self._runs.pop(run_id, None)) is not None:
                run.ended.set_result(False)

    def _entries(self, run_id: str, event: Event, result: Result | None) -> Iterator[tuple[str, Entry]]:
        """What is written for an event of a run: nothing yet, or several."""
        run = self._runs.get(run_id)
        if run is None or run.handed_back or (event["type"] == "started" and run.started):
            return  # it is void, or goes on elsewhere, or from an earlier attempt
        if event["type"] in events.OUTPUT_TYPES and not run.streams:
            for joined in run.gather(event):
                yield run_id, self._entry(run, joined)
            return
        if event["type"] == "line":
            run.forget(event["line"])
        if event["type"] == HAND_BACK or events.is_terminal(event):
            for joined in run.rest():
                yield run_id, self._entry(run, joined)
        if event["type"] == HAND_BACK:
            run.handed_back = True
        else:
            yield run_id, self._entry(run, event, result)

    @staticmethod
    def _entry(run: _Run, event: Event, result: Result | None = None) -> Entry:
        return Entry(run.attempt.job_id, run.attempt.number, run.number(event), result)

    def _write(self, entries: list[tuple[str, Entry]]) -> None:
        """Writes until Redis took it. Entries have fixed ids, so writing them twice changes nothing."""
        failures = failures_while_closing = 0
        while entries and failures_while_closing < CLOSING_ATTEMPTS:
            try:
                return self._settle(entries, self._ledger.write([entry for _, entry in entries]))
            except RedisError as error:
                if isinstance(error, ResponseError) and not isinstance(error, OutOfMemoryError | ReadOnlyError):
                    return self._write_one_by_one(entries, error)
                if not failures:
                    log.warning("events of %d run(s) wait for Redis: %s", len({run for run, _ in entries}), error)
            failures += 1
            failures_while_closing += self._closing.is_set()
            time.sleep(RETRY_S)
        if entries:
            log.error("%d events were not written: Redis did not answer before the worker ended", len(entries))
            for run_id in {run_id for run_id, _ in entries}:
                self._give_up(run_id)
        return None

    def _write_one_by_one(self, entries: list[tuple[str, Entry]], error: ResponseError) -> None:
        """One event that Redis refuses holds up no other."""
        if len(entries) == 1:
            log.error("Redis refuses an event of run %s: %s", entries[0][0], error)
            self._give_up(entries[0][0])
        else:
            for each in entries:
                self._write([each])

    def _settle(self, entries: list[tuple[str, Entry]], void: set[int]) -> None:
        for place, (run_id, entry) in enumerate(entries):
            run = self._runs.get(run_id)
            if run is None:
                continue
            if place in void:
                log.warning("run %s is void: its job has another attempt, or an end", run_id)
                self._give_up(run_id)
            elif events.is_terminal(entry.event):
                del self._runs[run_id]
                run.ended.set_result(True)
            elif entry.event["type"] in events.PROGRESS_TYPES:
                run.on_token()
                if entry.event["type"] == "line":
                    run.on_line(entry.event["line"])

    def _give_up(self, run_id: str) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            self._on_void(run_id)  # before anybody draws conclusions from the end
            run.ended.set_result(False)
