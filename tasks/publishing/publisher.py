"""The publisher thread: what engines report in one step becomes one call of Redis, fenced by each run's attempt.

It serves every attempt of the worker, so an event that can't be written ends the attempt that it belongs to, and no
other. An error that belongs to no attempt ends the process: its jobs continue elsewhere, instead of waiting forever.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from cellama.engine import Finished, Pulse
from cellama.tasks.broker.celery_ends import CeleryEnd
from cellama.tasks.broker.pool import Interruption, JobControl
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract import events
from cellama.tasks.contract.errors import JobFailed
from cellama.tasks.contract.events import LineEvent
from cellama.tasks.middleware import Middlewares
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Attempt, Entry

from .attempt_stream import AttemptStream, Publication, unsigned
from .results import contexts_of, error_event, error_of, event_of, line_event_of, result_of_end

if TYPE_CHECKING:
    from cellama.engine import Event as EngineEvent

log = logging.getLogger(__name__)

RETRY_S = 0.5  # seconds between two writes while Redis does not accept them
CLOSING_ATTEMPTS = 4  # writes that Redis may refuse after `hurry`: 2 s of the time that a stopping worker has
LINE_MARK = "\x1f"  # in the id of a request: between the run of a chunk and the number of its line
MAX_BATCH = 1000  # events per call of Redis, which serves no other client for the milliseconds that they take
MAX_BATCH_BYTES = 8 << 20  # bytes of events per call, for the same reason; a larger event is written alone
Numbered = tuple[str, Entry]  # with the run id


class Publisher:
    """Numbers, journals and publishes the events of all attempts of a worker."""

    def __init__(self, ledger: Ledger, worker: str, middlewares: Middlewares) -> None:
        self._ledger = ledger
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
        """Take the events of an attempt from now on.

        `control` is interrupted if the job has another attempt or an end, if its events can't be written, or if it
        must continue from its journal, of which Redis has lost the last events. `on_token` is called, on the
        publisher's thread, with each token that is in Redis.
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
        """What an engine calls once per step; the conversion is left to the publisher's thread."""
        return lambda engine_events: self._inbox.put(
            lambda: [made for event in engine_events if (made := self._convert(model_id, event)) is not None]
        )

    def hurry(self) -> None:
        """The worker stops: what Redis does not take in `CLOSING_ATTEMPTS` is given up, and computed elsewhere."""
        self._closing.set()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Write what is there, then end the thread. False if Redis did not take it in time."""
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
            log.critical("events can't be published any more", exc_info=True)
            self.pulse.die(f"{type(error).__name__}: {error}")

    def _take(self, make: Callable[[], list[Publication]] | None) -> bool:
        """Publish this and what came after it; False once the last of all was among that."""
        publications: list[Publication] = []
        while make is not None:
            self.pulse.beat("events", self._streams.keys())
            publications += make()
            if self._inbox.empty() or len(publications) >= MAX_BATCH:  # a slow Redis must not make it slower still
                break
            make = self._inbox.get()
        self._publish(publications)
        return make is not None

    def _convert(self, model_id: str, event: EngineEvent) -> Publication | None:
        """An engine's event in the words of the contract, or the failure of its attempt or line; None if the contract
        has no event for it."""
        run_id, mark, line = event.request_id.partition(LINE_MARK)
        if isinstance(event, Finished):
            self._middlewares.after_request(run_id, model_id, event)
        stream = self._streams.get(run_id)
        sign = unsigned if stream is None else stream.signer(line)
        try:
            if mark:
                of_line = line_event_of(event, int(line), model_id, sign)
                return None if of_line is None else Publication(run_id, of_line)
            fingerprint = "" if stream is None else stream.details.get("fingerprint", "")
            return Publication(
                run_id,
                event_of(event, model_id, self._worker, sign),
                result=result_of_end(event, model_id, sign),
                contexts=contexts_of(event, fingerprint),
            )
        except Exception as error:
            failure = _unforeseen(run_id, error)
            if mark:
                return Publication(run_id, _line_failed(int(line), failure))
            return Publication(run_id, failure=failure)

    def _publish(self, publications: list[Publication]) -> None:
        for page in _pages([entry for each in publications for entry in self._entries_of(each)]):
            self._write(page)
        for each in publications:
            if each.event is None and each.failure is None:  # handed back
                stream = self._streams.pop(each.run_id, None)
                if stream is not None:
                    stream.ended.set_result(False)

    def _entries_of(self, publication: Publication) -> list[Numbered]:
        """What is written: nothing yet, or several entries; if the event can't be encoded, its failure."""
        stream = self._streams.get(publication.run_id)
        if stream is None or stream.closed:
            return []  # it is superseded, continues elsewhere, or has failed
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
            failure = _unforeseen(publication.run_id, error)
            if event is not None and event["type"] == "line":
                entries.append(stream.entry(_line_failed(event["line"], failure)))
            else:
                stream.closed, stream.failure = True, failure
                entries.append(stream.entry(error_event(failure)))
        return [(publication.run_id, entry) for entry in entries]

    def _write(self, entries: list[Numbered]) -> None:
        """Write until Redis took it. Entries have fixed ids, so writing them twice changes nothing."""
        failures_while_closing = 0
        with redis_waits.of("the publisher of events") as waits:
            while entries and failures_while_closing < CLOSING_ATTEMPTS:
                try:
                    self.pulse.rest()  # the time that Redis takes is no fault of this thread
                    superseded, gaps = self._ledger.write([entry for _, entry in entries])
                    self.pulse.beat("events", self._streams.keys())
                    return self._settle(entries, superseded, gaps)
                except RedisError as error:
                    if not is_passing(error):
                        return self._write_one_by_one(entries, error)
                    waits(error)
                failures_while_closing += self._closing.is_set()
                time.sleep(RETRY_S)
        if entries:
            log.error("%d events were not written: Redis did not accept them before the worker ended", len(entries))
            for run_id in {run_id for run_id, _ in entries}:
                self._give_up(run_id, Interruption.SUPERSEDED)
        return None

    def _write_one_by_one(self, entries: list[Numbered], error: RedisError) -> None:
        """An event that Redis refuses delays no other."""
        if len(entries) == 1:
            log.error("Redis refuses an event of run %s: %s", entries[0][0], error)
            self._give_up(entries[0][0], Interruption.SUPERSEDED)
        else:
            for each in entries:
                self._write([each])

    def _settle(self, entries: list[Numbered], superseded: set[int], gaps: set[int]) -> None:
        """The entries are written, except for those at these places."""
        for place, (run_id, entry) in enumerate(entries):
            stream = self._streams.get(run_id)
            if stream is None:
                continue
            if place in superseded:
                log.warning("run %s is superseded: its job has another attempt, or an end", run_id)
                self._give_up(run_id, Interruption.SUPERSEDED)
            elif place in gaps:
                log.warning("Redis has lost events of run %s: the job continues from those that it has", run_id)
                self._give_up(run_id, Interruption.HANDED_BACK)
            elif entry.event_class == "terminal":
                del self._streams[run_id]
                stream.end()  # first: who is interrupted asks for it
                if stream.failure is not None:
                    stream.control.interrupt(Interruption.FAILED)
            elif entry.event_class == "progress":
                stream.on_token()
                if entry.event["type"] == "line":
                    stream.on_line(entry.event["line"])

    def _give_up(self, run_id: str, reason: Interruption) -> None:
        stream = self._streams.pop(run_id, None)
        if stream is not None:
            stream.control.interrupt(reason)  # before conclusions are drawn from the end
            stream.ended.set_result(False)


def _pages(entries: list[Numbered]) -> Iterator[list[Numbered]]:
    """The entries in their order, in pages that Redis takes in one call."""
    page: list[Numbered] = []
    num_bytes = 0
    for each in entries:
        if page and (len(page) == MAX_BATCH or num_bytes + each[1].num_bytes > MAX_BATCH_BYTES):
            yield page
            page, num_bytes = [], 0
        page.append(each)
        num_bytes += each[1].num_bytes
    if page:
        yield page


def _unforeseen(run_id: str, error: Exception) -> JobFailed:
    if isinstance(error, JobFailed):
        return error
    log.error("an event of run %s can't be written", run_id, exc_info=error)
    return JobFailed("internal_error", f"an event could not be written: {type(error).__name__}: {error}")


def _line_failed(line: int, failure: JobFailed) -> LineEvent:
    return events.line(line, {"error": error_of(failure)})
