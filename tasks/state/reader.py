"""Read the events of a job: first from the journal, then what is published live, without gap or repetition.

`EventCursor` decides the order, and is pure. The loop here is for threads, with a connection for each reader. For
asyncio, `tasks/live` reads many jobs over two connections.
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
from cellama.tasks.contract.events import EVENT_FIELD, Event, is_terminal
from cellama.tasks.contract.keys import events_channel, job_key, journal_key, stream_id

QUIET_S = 1.0  # without a message, until the journal is read again, because pub/sub may lose one
SUBSCRIBE_S = 10.0  # for Redis to confirm a subscription
PAGE = 200  # journal entries per read, which a slow reader has in memory
STREAM_TIMEOUT_S = 30.0  # without an event, until the reader gives up
UNKNOWN_S = 2.0  # for the first sign of a job, which has no entry before a worker takes it if plain Celery sent it
GONE_S = 10.0  # for a known job to come back, because a failover may be under way
MOST_AFTER = 2**63 - 1  # ids of journal entries are 64 bits long
COMPARED = ("type", "index", "tokens", "text", "line", "result")  # fields of events that must not change


@dataclass(frozen=True, slots=True)
class JournalPage:
    """What Redis has of a job, read in the order of these fields: if the state is `done`, all events are in them."""

    state: str | None  # of the ledger's entry, None if it has none
    num_events: int  # that the entry counts
    last: Event | None  # of the whole journal
    entries: list[Any]  # up to PAGE, from the id on that was asked for

    @property
    def is_known(self) -> bool:
        """Return whether there is a sign of the job."""
        return self.state is not None or self.last is not None

    def end_seq(self) -> int | None:
        """Return the seq of the terminal event, None while the job has not ended.

        It is in the journal and in the entry, because each may outlive the other.
        """
        if self.last is not None and is_terminal(self.last):
            return self.last["seq"]
        return self.num_events - 1 if self.state == "done" else None


NUM_REPLIES = 3  # to the commands of `ask_for_page`


def ask_for_page(pipe: Any, job_id: str, start: str) -> None:
    """Add the commands for a page to a pipeline, which need not be a transaction."""
    pipe.hmget(job_key(job_id), "state", "next_seq")
    pipe.xrevrange(journal_key(job_id), count=1)
    pipe.xrange(journal_key(job_id), min=start, count=PAGE)


def page_of(replies: Sequence[Any]) -> JournalPage:
    """Return the page that these replies contain."""
    (state, num_events), last, entries = replies
    return JournalPage(
        None if state is None else state.decode(),
        int(num_events or 0),
        _parse_entry(last[0]) if last else None,
        entries,
    )


class EventCursor:
    """Decides which event is next, and whether to read it from the journal. It neither reads nor waits.

    It keeps a checksum of each event that it returned. If Redis has lost its last writes, an attempt writes these
    events again. If they differ this time, the reader gets an error instead of a text that is half old and half new.
    """

    def __init__(self, job_id: str, after: int = -1) -> None:
        """Return events with a seq above `after`. Raises InvalidJob."""
        if isinstance(after, bool) or not isinstance(after, int) or not -1 <= after < MOST_AFTER:
            raise InvalidJob(
                f"after is {after!r}, which is not the seq of an event; give the `seq` of the last event that you "
                "have, or -1 for all events"
            )
        self.job_id = job_id
        self.last_seq = after
        self.ended = False
        self.needs_journal = True  # until the journal has been read to its end
        self._first = self._next_read = after + 1
        self._checksums = array("L")  # of each event from `_first` on

    def connected_again(self) -> None:
        """Compare the journal with what was returned, because Redis may be another one by now, or have lost events."""
        self.needs_journal, self._next_read = True, self._first

    def from_page(self, page: JournalPage) -> list[Event]:
        """Return the new events of a page of the journal.

        The stream has ended when the page has the terminal event, or when that event's seq is not above `after`. Raises
        StreamTrimmed when events are gone, UnknownJob when all events of a finished job are gone.
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
        self.needs_journal = len(entries) >= PAGE
        events = [_parse_entry(entry) for entry in entries]
        for event in events:
            self._compare(event)
            self._next_read = event["seq"] + 1
        new = [event for event in events if self._is_new(event)]
        if new and new[0]["seq"] != self.last_seq + 1:
            raise self._trimmed(new[0]["seq"] - 1)
        return self._take(new)

    def _trimmed(self, last: int) -> StreamTrimmed:
        return StreamTrimmed(
            f"events {self.last_seq + 1} to {last} of job {self.job_id} are gone; "
            "read from a later one, or take the result"
        )

    def from_message(self, message: Any) -> list[Event]:
        """Return the event of a pub/sub message if it is the next one; otherwise the journal is needed."""
        if message is None:
            self.needs_journal = True
        elif message["type"] == "subscribe":  # the connection was lost
            self.connected_again()
        elif message["type"] == "message":
            return self.from_published(message["data"])
        return []

    def from_published(self, data: bytes) -> list[Event]:
        """Return the event that was published if it is the next one; otherwise the journal is needed."""
        event: Event = json.loads(data.decode())  # of bytes json would guess the encoding first
        self._compare(event)
        if event["seq"] == self.last_seq + 1 == self._next_read:
            self._next_read += 1
            return self._take([event])
        if self._is_new(event):
            self.needs_journal = True
        elif is_terminal(event):  # the caller asked for events after the end
            self.ended = True
        return []

    @property
    def journal_start(self) -> str:
        """Return the id of the journal entry to read from."""
        return stream_id(self._next_read)

    def _compare(self, event: Event) -> None:
        index = event["seq"] - self._first
        if 0 <= index < len(self._checksums) and self._checksums[index] != _checksum(event):
            raise StreamTrimmed(
                f"Redis has lost events of job {self.job_id} that were read, and from {event['seq']} on others "
                "stand in their place; read the stream again from its start, or take the result"
            )

    def _is_new(self, event: Event) -> bool:
        return bool(event["seq"] > self.last_seq)

    def _take(self, events: list[Event]) -> list[Event]:
        if events:
            self._checksums.extend(map(_checksum, events))
            self.last_seq = events[-1]["seq"]
            self.ended = is_terminal(events[-1])
        return events


def _parse_entry(entry: Any) -> Event:
    _, fields = entry
    event: Event = json.loads(fields.get(EVENT_FIELD.encode()) or fields[EVENT_FIELD])
    return event


def _checksum(event: Event) -> int:
    """Return a checksum of what a reader relies on: not of the worker that wrote it, nor of its timings."""
    return zlib.crc32(repr([event.get(name) for name in COMPARED]).encode())


def _unknown(job_id: str) -> str:
    return f"there is no job {job_id}, or not any more: events are kept for a while after the end only"


class Patience:
    """Decides how long to wait for the next message, when to send a ping, and when to give up.

    While a known job writes nothing, the waits get longer, up to `most_quiet_s`.
    """

    def __init__(self, job_id: str, timeout_s: float, ping_s: float, most_quiet_s: float = QUIET_S) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._ping_s = ping_s
        self._most_quiet_s = most_quiet_s
        self.heard()
        self._is_known = False  # whether there is a sign of the job
        self._unknown_at = time.monotonic() + UNKNOWN_S

    def heard(self) -> None:
        """Note an event of the job."""
        now = time.monotonic()
        self._is_known = True
        self._deadline, self._ping_at = now + self._timeout_s, now + self._ping_s
        self._quiet_s, self._look_at = QUIET_S, now + QUIET_S

    def looked(self, is_known: bool) -> None:
        """Note whether Redis has a sign of the job. A job that was known gets GONE_S to come back."""
        if self._is_known and not is_known:
            self._unknown_at = time.monotonic() + GONE_S
        self._is_known = is_known

    def wait_s(self) -> float:
        """Return the seconds to wait now. Raises JobTimeout, UnknownJob."""
        now = time.monotonic()
        if not self._is_known and now >= self._unknown_at:
            raise UnknownJob(_unknown(self._job_id))
        remaining_s = self._deadline - now
        if remaining_s <= 0:
            raise JobTimeout(
                f"job {self._job_id} told nothing for {self._timeout_s:g} s; it may still wait in its queue: "
                f"see `cellama status {self._job_id}`, or wait longer"
            )
        return max(0.0, min(self._look_at - now, remaining_s, self._ping_at - now))

    def is_look_due(self) -> bool:
        """Return whether to read the journal after a wait without a message."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._quiet_s = min(2 * self._quiet_s, self._most_quiet_s) if self._is_known else QUIET_S
        self._look_at = now + self._quiet_s
        return True

    def ping(self) -> list[Event]:
        """Return an event without `seq` when `ping_s` have passed without an event, else nothing."""
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
    """Yield the events of a job with a `seq` above `after`, up to the terminal one. Any number of readers can do so.

    The stream of a finished job whose last `seq` is not above `after` ends at once. A `cursor` that was used before
    continues where it was, instead of after `after`. Whenever `ping_s` pass without an event, an event of type `ping`
    without a `seq` comes. Raises InvalidJob if `after` is not a seq, JobTimeout if nothing comes for `timeout_s`,
    StreamTrimmed if events are gone, UnknownJob if there is no sign of the job.
    """
    cursor, patience = cursor or EventCursor(job_id, after), Patience(job_id, timeout_s, ping_s)
    cursor.connected_again()
    with redis.pubsub() as pubsub:  # type: ignore[no-untyped-call]
        pubsub.subscribe(events_channel(job_id, database_of(redis)))
        pubsub.get_message(timeout=SUBSCRIBE_S)  # subscribed from here on: the journal can't miss what is live
        while not cursor.ended:
            if cursor.needs_journal:
                pipe = redis.pipeline(transaction=False)
                ask_for_page(pipe, job_id, cursor.journal_start)
                page = page_of(pipe.execute())
                patience.looked(page.is_known)
                new = cursor.from_page(page)
            else:
                message = pubsub.get_message(timeout=patience.wait_s())
                new = cursor.from_message(message) if message or patience.is_look_due() else []
            if new:
                yield from new
                patience.heard()
            else:
                yield from patience.ping()
