"""The publisher thread: what engines tell in one step becomes one call of Redis, fenced by each run's attempt.

It serves every run of the worker, so what goes wrong with an event ends the run that it belongs to, and nothing else.
What can't be pinned on a run ends the process: its jobs go on elsewhere, instead of waiting here for ever.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from cellama.engine import Pulse
from cellama.tasks.broker.celery_ends import CeleryEnd
from cellama.tasks.broker.pool import Interruption
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract import events
from cellama.tasks.contract.all_kinds import Result
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import Event, Foundation, LineEvent
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Attempt, Contexts, Entry

from .attempt_events import Order, RunEvents
from .pages import MAX_BATCH, Numbered, pages
from .signing import Signer

if TYPE_CHECKING:
    from cellama.engine import Event as EngineEvent

log = logging.getLogger(__name__)

RETRY_S = 0.5
CLOSING_ATTEMPTS = 4
LINE_MARK = "\x1f"  # in the id of a request: between the run of a chunk and the number of its line
# Run id, event without its seq; with a terminal event the result, and contexts by key.
Told = list[tuple[str, Order, Result | None, Contexts]]


class Publisher:
    """Numbers, journals and publishes the events of all runs of a worker. Owns the `seq` of each."""

    def __init__(
        self,
        ledger: Ledger,
        worker: str,
        interrupt: Callable[[str, Interruption], None],
        signer: Signer,
        watch: Callable[[str, EngineEvent], None] = lambda model_id, event: None,
    ) -> None:
        """`interrupt` ends, on this thread, the run with this id, and says why: its job has another attempt, or an end;
        its events can't be written; or it must go on from its journal, of which Redis has lost the last events.
        `watch` hears of each event of an engine, on this thread, with the model's id, and raises nothing."""
        self._ledger = ledger
        self._worker = worker
        self._interrupt = interrupt
        self._signer = signer
        self._watch = watch
        self.pulse = Pulse("cellama-publisher")
        self._runs: dict[str, RunEvents] = {}
        self._inbox: queue.SimpleQueue[Callable[[], Told] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name=self.pulse.name, daemon=True)
        self._thread.start()

    # For other threads. What is said of events before they come needs no turn of the publisher thread.

    def open(
        self,
        attempt: Attempt,
        next_seq: int = 0,
        *,
        streams: bool = True,
        started: bool = False,
        on_token: Callable[[], None] = lambda: None,
        celery_end: CeleryEnd | None = None,
    ) -> Future[bool]:
        """Takes the events of a run from now on. The future tells whether its terminal event counts.

        It raises JobFailed if the run was ended here, with that error, because an event of it could not be written.
        `on_token` is called, on this thread, once its first token is in Redis. By `celery_end` Celery hears of its end.
        """
        run = RunEvents(attempt, next_seq, streams, started, on_token, celery_end)
        self._runs[attempt.run_id] = run
        return run.ended

    def listener(self, model_id: str) -> Callable[[tuple[EngineEvent, ...]], None]:
        """What an engine calls once per step; the conversion is left to the publisher thread."""
        return lambda engine_events: self._inbox.put(
            lambda: [told for event in engine_events for told in self._convert(model_id, event)]
        )

    def watch_lines(self, run_id: str, on_line: Callable[[int], None]) -> None:
        """Calls `on_line`, on this thread, with each line of a chunk whose end is in Redis."""
        self._change(run_id, lambda run: setattr(run, "on_line", on_line))

    def describe(self, run_id: str, details: Foundation) -> None:
        """Adds these to what the `started` event of a run will say."""
        self._change(run_id, lambda run: setattr(run, "details", details))

    def sign_with(self, request_id: str, signer: Signer) -> None:
        """Lets this one sign what is thought for a request, if it is told before the engine is given that."""
        run_id, _, line = request_id.partition(LINE_MARK)
        self._change(run_id, lambda run: run.signers.__setitem__(line, signer))

    def _change(self, run_id: str, change: Callable[[RunEvents], None]) -> None:
        if (run := self._runs.get(run_id)) is not None:
            change(run)

    def publish(self, run_id: str, event: Event, result: Result | None = None) -> None:
        """Publishes an event that no engine tells."""
        self._inbox.put(lambda: [(run_id, event, result, ())])

    def hand_back(self, run_id: str) -> None:
        """Writes what is gathered, and nothing more of this run. Its future says False then."""
        self._inbox.put(lambda: [(run_id, {"type": "hand_back"}, None, ())])

    def hurry(self) -> None:
        """The worker ends: what Redis does not take in `CLOSING_ATTEMPTS` is given up, and computed elsewhere."""
        self._closing.set()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Writes what is there, then ends; False if Redis did not take it in time."""
        self.hurry()
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The publisher thread

    def _work(self) -> None:
        try:
            self._serve()
            self.pulse.close()
        except Exception as error:
            log.critical("events can't be published any more", exc_info=True)
            self.pulse.die(f"{type(error).__name__}: {error}")

    def _serve(self) -> None:
        while self._take(self._inbox.get()):
            self.pulse.rest()

    def _take(self, make: Callable[[], Told] | None) -> bool:
        """Tells this and what came after it; False once the last of all was among that."""
        told: Told = []
        while make is not None:
            self.pulse.beat("events", self._runs.keys())
            told += make()
            if self._inbox.empty() or len(told) >= MAX_BATCH:  # a slow Redis must not make it slower still
                break
            make = self._inbox.get()
        self._tell(told)
        return make is not None

    def _convert(self, model_id: str, event: EngineEvent) -> Told:
        """An engine's event in the words of the contract; if that can't be said, how its run or its line ends."""
        from .results import contexts_of, event_of, line_event_of, result_of_end

        self._watch(model_id, event)
        run_id, mark, line = event.request_id.partition(LINE_MARK)
        run = self._runs.get(run_id)
        signer = self._signer if run is None else run.signers.get(line, self._signer)
        try:
            if not mark:
                own = event_of(event, model_id, self._worker, signer)
                fingerprint = "" if run is None else run.details.get("fingerprint", "")
                return [(run_id, own, result_of_end(event, model_id, signer), contexts_of(event, fingerprint))]
            of_line = line_event_of(event, int(line), model_id, signer)
            return [] if of_line is None else [(run_id, of_line, None, ())]
        except Exception as error:
            failure = _unforeseen(run_id, error)
            told: Order = _line_failed(int(line), failure) if mark else {"type": "fail", "failure": failure}
            return [(run_id, told, None, ())]

    def _tell(self, told: Told) -> None:
        for page in pages([entry for each in told for entry in self._entries_of(*each)]):
            self._write(page)
        for run_id, event, *_ in told:
            if event["type"] == "hand_back" and (run := self._runs.pop(run_id, None)) is not None:
                run.ended.set_result(False)

    def _entries_of(self, run_id: str, event: Order, result: Result | None, contexts: Contexts) -> list[Numbered]:
        """What is written for an event of a run: nothing yet, or several; if that can't be encoded, its failure."""
        run = self._runs.get(run_id)
        if run is None or run.closed or (event["type"] == "started" and run.started):
            return []  # it is superseded, goes on elsewhere, has failed, or is from an earlier attempt
        entries: list[Entry] = []
        try:
            for each in self._to_write(run, event):
                entries.append(run.entry(each, result, contexts) if each is event else run.entry(each))
        except Exception as error:
            failure = _unforeseen(run_id, error)
            if event["type"] == "line":
                entries.append(run.entry(_line_failed(event["line"], failure)))
            else:
                entries.append(self._end_failed(run, failure))
        return [(run_id, entry) for entry in entries]

    def _to_write(self, run: RunEvents, event: Order) -> Iterator[Event]:
        if event["type"] == "hand_back" or event["type"] == "fail" or events.is_terminal(event):
            yield from run.rest()
            run.closed = True
        if event["type"] == "fail":
            raise event["failure"]
        if event["type"] == "hand_back":
            return
        if events.is_output(event) and not run.streams:
            yield from run.gather(event)
            return
        if event["type"] == "line":
            run.forget(event["line"])
        if event["type"] == "started":
            event = {**event, **run.details}
        yield event

    @staticmethod
    def _end_failed(run: RunEvents, failure: JobFailed) -> Entry:
        run.closed, run.failure = True, failure
        return run.entry(events.error(failure.code, failure.message, failure.retryable))

    def _write(self, entries: list[Numbered]) -> None:
        """Writes until Redis took it. Entries have fixed ids, so writing them twice changes nothing."""
        failures_while_closing = 0
        with redis_waits.of("the publisher of events") as waits:
            while entries and failures_while_closing < CLOSING_ATTEMPTS:
                try:
                    self.pulse.rest()  # how long Redis takes is no fault of this thread
                    unwritten = self._ledger.write([entry for _, entry in entries])
                    self.pulse.beat("events", self._runs.keys())
                    return self._settle(entries, unwritten)
                except RedisError as error:
                    if not is_passing(error):
                        return self._write_one_by_one(entries, error)
                    waits(error)
                failures_while_closing += self._closing.is_set()
                time.sleep(RETRY_S)
        if entries:
            log.error("%d events were not written: Redis did not accept them before the worker ended", len(entries))
            for run_id in {run_id for run_id, _ in entries}:
                self._give_up(run_id)
        return None

    def _write_one_by_one(self, entries: list[Numbered], error: RedisError) -> None:
        """One event that Redis refuses holds up no other."""
        if len(entries) == 1:
            log.error("Redis refuses an event of run %s: %s", entries[0][0], error)
            self._give_up(entries[0][0])
        else:
            for each in entries:
                self._write([each])

    def _settle(self, entries: list[Numbered], unwritten: tuple[set[int], set[int]]) -> None:
        superseded, gaps = unwritten
        for place, (run_id, entry) in enumerate(entries):
            run = self._runs.get(run_id)
            if run is None:
                continue
            if place in superseded:
                log.warning("run %s is superseded: its job has another attempt, or an end", run_id)
                self._give_up(run_id)
            elif place in gaps:
                log.warning("Redis has lost events of run %s: the job goes on from those that it has", run_id)
                self._give_up(run_id, Interruption.HANDED_BACK)
            elif events.is_terminal(entry.event):
                self._settle_end(run_id, run)
            elif entry.event_class == "progress":
                run.on_token()
                if entry.event["type"] == "line":
                    run.on_line(entry.event["line"])

    def _settle_end(self, run_id: str, run: RunEvents) -> None:
        del self._runs[run_id]
        run.end()  # first: who is interrupted asks for it
        if run.failure is not None:
            self._interrupt(run_id, Interruption.FAILED)

    def _give_up(self, run_id: str, reason: Interruption = Interruption.SUPERSEDED) -> None:
        run = self._runs.pop(run_id, None)
        if run is not None:
            self._interrupt(run_id, reason)  # before conclusions are drawn from the end
            run.ended.set_result(False)


def _unforeseen(run_id: str, error: Exception) -> JobFailed:
    if isinstance(error, JobFailed):
        return error
    log.error("an event of run %s can't be written", run_id, exc_info=error)
    return JobFailed("internal_error", f"an event could not be written: {type(error).__name__}: {error}")


def _line_failed(line: int, failure: JobFailed) -> LineEvent:
    from .results import error_of

    return events.line(line, {"error": error_of(failure)})
