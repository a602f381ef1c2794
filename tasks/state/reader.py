"""Reads the events of a job: what is in the journal, then what is published live, without gap or repetition.

The order is in one pure class. The loop here is that of threads, with a connection for each reader; for asyncio
`tasks/live` has readers of many jobs on two connections.
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

QUIET_S = 1.0  # after so long without a message the journal is read again: pub/sub may lose one
SUBSCRIBE_S = 10.0  # for Redis to confirm a subscription
PAGE = 200  # journal entries per read: as many a slow reader holds
STREAM_TIMEOUT_S = 30.0
UNKNOWN_S = 2.0  # for the first sign of a job, which plain Celery does not tell of before a worker has it
GONE_S = 10.0  # for a known job of which Redis has nothing any more: a failover may be under way
MOST_AFTER = 2**63 - 1  # ids of journal entries are 64 bits long
TOLD = ("type", "index", "tokens", "text", "line", "result")  # fields of events


@dataclass(frozen=True, slots=True)
class JournalPage:
    """What Redis has of a job, read in the order of these fields, so a job that was done has all its events in them."""

    state: str | None  # of the ledger's entry, None if it has none
    num_events: int  # that the entry counts
    last: Event | None  # of the whole journal
    entries: list[Any]  # from the place on that the reader asked for, up to PAGE

    @property
    def is_known(self) -> bool:
        """There is a sign of the job."""
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
    """Puts the commands for a page into a pipeline, which need not be a transaction."""
    pipe.hmget(job_key(job_id), "state", "next_seq")
    pipe.xrevrange(journal_key(job_id), count=1)
    pipe.xrange(journal_key(job_id), min=start, count=PAGE)


def page_of(replies: Sequence[Any]) -> JournalPage:
    """The page that these replies are."""
    (state, num_events), last, entries = replies
    return JournalPage(
        None if state is None else state.decode(),
        int(num_events or 0),
        _parse_entry(last[0]) if last else None,
        entries,
    )


class EventCursor:
    """Knows which event comes next, and who has it. Pure: it neither reads nor waits.

    It remembers what it has told: a Redis that has lost its last writes gets those events again, and if they are others
    this time, the reader hears of it instead of a text that is half of the one and half of the other.
    """

    def __init__(self, job_id: str, after: int = -1) -> None:
        """Raises InvalidJob."""
        if isinstance(after, bool) or not isinstance(after, int) or not -1 <= after < MOST_AFTER:
            raise InvalidJob(
                f"after is {after!r}, which is not the seq of an event; give the `seq` of the last event that you "
                "have, or -1 for all events"
            )
        self.job_id = job_id
        self.last_seq = after
        self.ended = False
        self.needs_journal = True  # until the journal has nothing more to say
        self._first = self._next_read = after + 1
        self._told = array("L")  # a sum of each event from `_first` on

    def connected_again(self) -> None:
        """Redis may be another one by now, or have lost something: the journal is compared with what was told."""
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
        """The new event of a pub/sub message, if it is the next one; otherwise the journal is asked."""
        if message is None:
            self.needs_journal = True
        elif message["type"] == "subscribe":  # the connection was lost
            self.connected_again()
        elif message["type"] == "message":
            return self.from_published(message["data"])
        return []

    def from_published(self, data: bytes) -> list[Event]:
        """`from_message` for what was published itself."""
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
        """Id of the journal entry to read from."""
        return stream_id(self._next_read)

    def _compare(self, event: Event) -> None:
        place = event["seq"] - self._first
        if 0 <= place < len(self._told) and self._told[place] != _sum_of(event):
            raise StreamTrimmed(
                f"Redis has lost events of job {self.job_id} that were read, and from {event['seq']} on others "
                "stand in their place; read the stream again from its start, or take the result"
            )

    def _is_new(self, event: Event) -> bool:
        return bool(event["seq"] > self.last_seq)

    def _take(self, events: list[Event]) -> list[Event]:
        if events:
            self._told.extend(map(_sum_of, events))
            self.last_seq = events[-1]["seq"]
            self.ended = is_terminal(events[-1])
        return events


def _parse_entry(entry: Any) -> Event:
    _, fields = entry
    event: Event = json.loads(fields.get(EVENT_FIELD.encode()) or fields[EVENT_FIELD])
    return event


def _sum_of(event: Event) -> int:
    """Of what a reader goes by; which worker says it, and how fast, is nothing to him."""
    return zlib.crc32(repr([event.get(name) for name in TOLD]).encode())


def _unknown(job_id: str) -> str:
    return f"there is no job {job_id}, or not any more: events are kept for a while after the end only"


class Patience:
    """How long to wait for the next message, when to tell the caller that it goes on, and when to give up.

    Of a job that is known the waits get longer, up to `most_quiet_s`, as long as it tells nothing.
    """

    def __init__(self, job_id: str, timeout_s: float, ping_s: float, most_quiet_s: float = QUIET_S) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._ping_s = ping_s
        self._most_quiet_s = most_quiet_s
        self.heard()
        self._is_known = False  # there is a sign of the job
        self._unknown_at = time.monotonic() + UNKNOWN_S

    def heard(self) -> None:
        """Of the job itself."""
        now = time.monotonic()
        self._is_known = True
        self._deadline, self._ping_at = now + self._timeout_s, now + self._ping_s
        self._quiet_s, self._look_at = QUIET_S, now + QUIET_S

    def looked(self, is_known: bool) -> None:
        """Whether a look into Redis has found a sign of the job. A job that was known is given time to come back."""
        if self._is_known and not is_known:
            self._unknown_at = time.monotonic() + GONE_S
        self._is_known = is_known

    def wait_s(self) -> float:
        """Seconds to wait now. Raises JobTimeout, UnknownJob."""
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
        """Whether it is time to look at the journal, after a wait without a message."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._quiet_s = min(2 * self._quiet_s, self._most_quiet_s) if self._is_known else QUIET_S
        self._look_at = now + self._quiet_s
        return True

    def ping(self) -> list[Event]:
        """One event without `seq` whenever `ping_s` have passed without another one."""
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
    """The events of a job with a `seq` above `after`, to the terminal one; any number of readers may do so.

    The stream of a finished job whose last event has the seq `after`, or a lower one, ends at once without an event. A
    `cursor` that was read with before goes on where it was, instead of behind `after`. Whenever `ping_s` pass without
    an event there is one of type `ping`, without a `seq`. Raises InvalidJob when `after` is not a seq, JobTimeout when
    nothing comes for `timeout_s`, StreamTrimmed when events are gone, UnknownJob when there is no sign of the job.
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
