"""Read the events of a job, first from the journal and then as they are published, without gaps or repetitions.

`EventCursor` decides which event is next, and does no I/O. `stream_events` is for threads, with one connection per
reader. For asyncio, `tasks/live` reads many jobs over two connections.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from cellama.tasks.connection.connections import database_of
from cellama.tasks.contract.errors import InvalidJob, JobTimeout, StreamTrimmed, UnknownJob
from cellama.tasks.contract.events import Event, is_terminal
from cellama.tasks.contract.journal import events_in
from cellama.tasks.contract.keys import events_channel, job_key, journal_key, stream_id

QUIET_S = 1.0  # after this time without a message, the journal is read again, because pub/sub can lose messages
SUBSCRIBE_TIMEOUT_S = 10.0  # until Redis confirms a subscription
PAGE_ENTRIES = 200  # journal entries per read, which a slow reader keeps in memory
STREAM_TIMEOUT_S = 30.0  # default time without an event until the reader stops
UNKNOWN_S = 2.0  # a job of plain Celery has no entry until a worker takes it, so an unknown job gets this long
GONE_S = 10.0  # a known job that is missing gets this long to return, because a failover may be in progress
MAX_AFTER = 2**63 - 1  # ids of journal entries have 64 bits
COMPARED_FIELDS = ("type", "index", "tokens", "text", "line", "result")  # these must not change in repeated events


@dataclass(frozen=True, slots=True)
class JournalPage:
    """A job's data in Redis. The fields are read from Redis in the order in which they are declared.

    Because `state` is read first, a page with the state `done` and the pages after it contain all of the job's events.
    """

    state: str | None  # from the ledger; None if the job has no entry
    num_events: int  # from the ledger
    last: Event | None  # the last event of the whole journal
    entries: list[Any]  # up to PAGE_ENTRIES entries from the requested id on

    @property
    def is_known(self) -> bool:
        """Return whether Redis has data about the job."""
        return self.state is not None or self.last is not None

    def end_seq(self) -> int | None:
        """Return the seq of the terminal event, or None while the job has not ended.

        The journal and the ledger entry are both checked, because either can expire before the other.
        """
        if self.last is not None and is_terminal(self.last):
            return self.last["seq"]
        return self.num_events - 1 if self.state == "done" else None


NUM_REPLIES = 3  # number of commands that `request_page` adds


def request_page(pipe: Any, job_id: str, start: str) -> None:
    """Add the commands for a page to a pipeline, which does not have to be a transaction."""
    pipe.hmget(job_key(job_id), "state", "next_seq")
    pipe.xrevrange(journal_key(job_id), count=1)
    pipe.xrange(journal_key(job_id), min=start, count=PAGE_ENTRIES)


def page_of(replies: Sequence[Any]) -> JournalPage:
    """Build the page from the replies to the commands that `request_page` added."""
    (state, num_events), last, entries = replies
    return JournalPage(
        None if state is None else state.decode(),
        int(num_events or 0),
        events_in(last)[-1] if last else None,
        entries,
    )


class EventCursor:
    """Decides which event is next, and whether to read it from the journal. The cursor itself does no I/O.

    The cursor keeps a checksum of each returned event. If Redis loses its last writes, an attempt writes these events
    again. If they differ from the returned events, the reader gets an error instead of a mixture of old and new text.
    """

    def __init__(self, job_id: str, after: int = -1) -> None:
        """Create a cursor that starts after the event with the seq `after`. Raises InvalidJob."""
        if isinstance(after, bool) or not isinstance(after, int) or not -1 <= after < MAX_AFTER:
            raise InvalidJob(
                f"after: {after!r} is not the seq of an event; pass the `seq` of the last event that you have "
                "received, or -1 for all events"
            )
        self.job_id = job_id
        self.last_seq = after
        self.ended = False
        self.needs_journal = True  # until the journal has been read to its end
        self._first = self._next_read = after + 1
        self._checksums = array("L")  # checksums of all events from `_first` on

    def reconnected(self) -> None:
        """Schedule a comparison of the journal with the returned events, because Redis may have lost events."""
        self.needs_journal, self._next_read = True, self._first

    def from_page(self, page: JournalPage) -> list[Event]:
        """Return the new events from a page of the journal.

        The stream ends with the terminal event, or immediately if the seq of this event is not above `after`. Raises
        StreamTrimmed if events have expired, and UnknownJob if all events of a finished job have expired.
        """
        new = self._from_journal(page.entries)
        end_seq = page.end_seq()
        if self.needs_journal or self.ended or end_seq is None:
            return new
        if page.last is None and self.last_seq < 0:
            raise UnknownJob(_unknown(self.job_id))
        if self.last_seq < end_seq:
            raise self._trimmed(end_seq)
        self.ended = True
        return new

    def _from_journal(self, entries: list[Any]) -> list[Event]:
        self.needs_journal = len(entries) >= PAGE_ENTRIES
        events = events_in(entries)
        for event in events:
            self._compare(event)
            self._next_read = event["seq"] + 1
        new = [event for event in events if self._is_new(event)]
        if new and new[0]["seq"] != self.last_seq + 1:
            raise self._trimmed(new[0]["seq"] - 1)
        return self._take(new)

    def _trimmed(self, last: int) -> StreamTrimmed:
        return StreamTrimmed(
            f"events {self.last_seq + 1} to {last} of job {self.job_id} have expired; "
            "read from a later event, or use the result"
        )

    def from_message(self, message: Any) -> list[Event]:
        """Return the event in a pub/sub message if it is the next event.

        If events are missing, set `needs_journal`.
        """
        if message is None:
            self.needs_journal = True
        elif message["type"] == "subscribe":  # the connection was lost
            self.reconnected()
        elif message["type"] == "message":
            return self.from_published(message["data"])
        return []

    def from_published(self, data: bytes) -> list[Event]:
        """Return a published event if it is the next event. If events are missing, set `needs_journal`."""
        event: Event = json.loads(data.decode())  # for bytes, json would detect the encoding first
        self._compare(event)
        if event["seq"] == self.last_seq + 1 == self._next_read:
            self._next_read += 1
            return self._take([event])
        if self._is_new(event):
            self.needs_journal = True
        elif is_terminal(event):  # `after` is behind the end
            self.ended = True
        return []

    @property
    def journal_start(self) -> str:
        """Return the id of the journal entry at which the next read starts."""
        return stream_id(self._next_read)

    def _compare(self, event: Event) -> None:
        index = event["seq"] - self._first
        if 0 <= index < len(self._checksums) and self._checksums[index] != _checksum(event):
            raise StreamTrimmed(
                f"Redis has lost events of job {self.job_id} that were already read, and other events have replaced "
                f"them from seq {event['seq']} on; read the stream again from its start, or use the result"
            )

    def _is_new(self, event: Event) -> bool:
        return bool(event["seq"] > self.last_seq)

    def _take(self, events: list[Event]) -> list[Event]:
        if events:
            self._checksums.extend(map(_checksum, events))
            self.last_seq = events[-1]["seq"]
            self.ended = is_terminal(events[-1])
        return events


def _checksum(event: Event) -> int:
    """Return a checksum of the event fields that readers rely on, which excludes the worker and the timings."""
    return zlib.crc32(repr([event.get(name) for name in COMPARED_FIELDS]).encode())


def _unknown(job_id: str) -> str:
    return (
        f"job {job_id} is unknown, or its data has expired; events are kept for a limited time after the end of a job"
    )


class ReadTimer:
    """Decides how long to wait for the next message, when to send a ping, and when to stop.

    While a known job has no new events, the pauses between reads of the journal grow, up to `max_quiet_s`.
    """

    def __init__(self, job_id: str, timeout_s: float, ping_s: float, max_quiet_s: float = QUIET_S) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._ping_s = ping_s
        self._max_quiet_s = max_quiet_s
        self.event_received()
        self._is_known = False  # whether Redis has data of the job
        self._unknown_at = time.monotonic() + UNKNOWN_S

    def event_received(self) -> None:
        """Record that an event was received."""
        now = time.monotonic()
        self._is_known = True
        self._deadline, self._ping_at = now + self._timeout_s, now + self._ping_s
        self._quiet_s, self._read_at = QUIET_S, now + QUIET_S

    def journal_read(self, is_known: bool) -> None:
        """Record whether Redis has data about the job. A known job may be missing for up to GONE_S seconds."""
        if self._is_known and not is_known:
            self._unknown_at = time.monotonic() + GONE_S
        self._is_known = is_known

    def wait_s(self) -> float:
        """Return how many seconds to wait for the next message. Raises JobTimeout or UnknownJob."""
        now = time.monotonic()
        if not self._is_known and now >= self._unknown_at:
            raise UnknownJob(_unknown(self._job_id))
        remaining_s = self._deadline - now
        if remaining_s <= 0:
            raise JobTimeout(
                f"no events from job {self._job_id} for {self._timeout_s:g} s; it may still be waiting in its queue "
                f"(see `cellama status {self._job_id}`); use a longer timeout to wait for it"
            )
        return max(0.0, min(self._read_at - now, remaining_s, self._ping_at - now))

    def take_journal_turn(self) -> bool:
        """Return True if the journal must be read because no message has arrived, and schedule the next read."""
        now = time.monotonic()
        if now < self._read_at:
            return False
        self._quiet_s = min(2 * self._quiet_s, self._max_quiet_s) if self._is_known else QUIET_S
        self._read_at = now + self._quiet_s
        return True

    def ping(self) -> list[Event]:
        """Return a list with a ping event if `ping_s` seconds have passed without an event, or else an empty list."""
        now = time.monotonic()
        if now < self._ping_at:
            return []
        self._ping_at = now + self._ping_s
        return [{"type": "ping"}]


def stream_events(
    redis: Redis,
    job_id: str,
    after: int = -1,
    timeout_s: float = STREAM_TIMEOUT_S,
    ping_s: float = math.inf,
    cursor: EventCursor | None = None,
) -> Iterator[Event]:
    """Yield the events of a job with a `seq` above `after`, up to the terminal event. A job can have many readers.

    If the last `seq` of a finished job is not above `after`, the stream ends immediately. A `cursor` that was used
    before continues at its position, and `after` is ignored. Whenever `ping_s` seconds pass without an event, an event
    of type `ping` without a `seq` is yielded. Raises InvalidJob if `after` is not a seq, JobTimeout if there is no
    event for `timeout_s`, StreamTrimmed if events have expired, and UnknownJob if Redis has no data about the job.
    """
    cursor, timer = cursor or EventCursor(job_id, after), ReadTimer(job_id, timeout_s, ping_s)
    cursor.reconnected()
    with redis.pubsub() as pubsub:  # type: ignore[no-untyped-call]
        pubsub.subscribe(events_channel(job_id, database_of(redis)))
        pubsub.get_message(timeout=SUBSCRIBE_TIMEOUT_S)  # from now on, no event is in neither journal nor channel
        while not cursor.ended:
            if cursor.needs_journal:
                pipe = redis.pipeline(transaction=False)
                request_page(pipe, job_id, cursor.journal_start)
                page = page_of(pipe.execute())
                timer.journal_read(page.is_known)
                new = cursor.from_page(page)
            else:
                message = pubsub.get_message(timeout=timer.wait_s())
                new = cursor.from_message(message) if message or timer.take_journal_turn() else []
            if new:
                yield from new
                timer.event_received()
            else:
                yield from timer.ping()
