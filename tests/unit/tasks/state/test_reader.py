"""Reading a stream without gaps and repetitions, from the journal and from pub/sub, which can lose messages."""

from __future__ import annotations

import json
import math
from typing import Any

import fakeredis
import pytest
from hypothesis import given, strategies as st

from cellama.tasks.contract.errors import InvalidJob, JobTimeout, StreamTrimmed, UnknownJob
from cellama.tasks.contract.keys import job_key, journal_key, stream_id
from cellama.tasks.state import reader
from cellama.tasks.state.reader import PAGE_ENTRIES, EventCursor, JournalPage, stream_events


def event(seq: int, last: int = 10**9) -> dict[str, Any]:
    return {"seq": seq, "type": "done" if seq == last else "token"}


def entry(seq: int, last: int = 10**9) -> tuple[bytes, dict[bytes, bytes]]:
    return stream_id(seq).encode(), {b"event": json.dumps(event(seq, last)).encode()}


def page(entries: list[Any], state: str | None = "running", num_events: int = 0) -> JournalPage:
    last = json.loads(entries[-1][1][b"event"]) if entries else None
    return JournalPage(state, num_events, last, entries[:PAGE_ENTRIES])


def message(seq: int, last: int = 10**9) -> dict[str, Any]:
    return {"type": "message", "data": json.dumps(event(seq, last)).encode()}


@given(st.integers(0, 30), st.lists(st.integers(-1, 30), max_size=60), st.integers(-1, 10))
def test_cursor_yields_each_event_once_in_order_when_messages_are_lost(
    last: int, arrivals: list[int], after: int
) -> None:
    """Published messages arrive in any order, twice or not at all (-1 is silence). The journal has all events."""
    cursor, got = EventCursor("j", after), []
    for live in [*(seq for seq in arrivals if seq <= last), -1, -1]:
        while cursor.needs_journal and not cursor.ended:
            got += cursor.from_page(page([entry(s, last) for s in range(cursor.last_seq + 1, last + 1)]))
        if cursor.ended:
            break
        got += cursor.from_message(None if live < 0 else message(live, last))
    assert [e["seq"] for e in got] == list(range(after + 1, last + 1))


def test_cursor_returns_published_events_without_reading_the_journal() -> None:
    cursor = EventCursor("j")
    assert cursor.from_page(page([entry(0)])) == [event(0)]
    assert cursor.from_message(message(0)) == []
    assert cursor.from_message(message(1)) == [event(1)]
    assert not cursor.needs_journal
    assert cursor.from_message(message(3)) == []
    assert cursor.needs_journal
    assert cursor.journal_start == stream_id(2)


def published(text: str, seq: int) -> dict[str, Any]:
    return {"type": "message", "data": json.dumps({**event(seq), "text": text}).encode()}


def journaled(*texts: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [(stream_id(seq).encode(), {b"event": published(text, seq)["data"]}) for seq, text in enumerate(texts)]


def test_cursor_continues_when_lost_events_are_written_again() -> None:
    cursor = EventCursor("j")
    cursor.from_page(page(journaled("a", "b", "c")))
    assert cursor.from_message({"type": "subscribe", "data": 1}) == []  # reconnected to Redis
    assert cursor.from_page(page(journaled("a"))) == []
    assert cursor.from_message(published("b", 1)) == []
    assert cursor.from_message(published("d", 3)) == []  # earlier events must be compared first
    assert [new["text"] for new in cursor.from_page(page(journaled("a", "b", "c", "d")))] == ["d"]
    assert [new["text"] for new in cursor.from_message(published("e", 4))] == ["e"]


@pytest.mark.parametrize("in_journal", [True, False])
def test_cursor_raises_when_repeated_events_differ(in_journal: bool) -> None:
    cursor = EventCursor("j")
    cursor.from_page(page(journaled("a", "b", "c")))
    cursor.reconnected()
    with pytest.raises(StreamTrimmed, match="other events have replaced them from seq 1 on"):
        cursor.from_page(page(journaled("a", "x", "c", "d"))) if in_journal else cursor.from_message(published("x", 1))


def test_cursor_raises_when_events_have_expired() -> None:
    with pytest.raises(StreamTrimmed, match="events 0 to 4 of job j have expired"):
        EventCursor("j").from_page(page([entry(5)]))


def test_stream_reads_a_journal_of_several_pages() -> None:
    redis = fakeredis.FakeRedis()
    last = 2 * PAGE_ENTRIES + 10
    for seq in range(last + 1):
        redis.xadd(journal_key("j"), {"event": json.dumps(event(seq, last))}, id=stream_id(seq))
    assert [e["seq"] for e in stream_events(redis, "j", after=4)] == list(range(5, last + 1))


def test_stream_of_a_silent_job_raises_a_timeout_that_names_the_job() -> None:
    redis = fakeredis.FakeRedis()
    redis.hset(job_key("silent"), "state", "queued")
    with pytest.raises(JobTimeout, match=r"no events from job silent for 0\.1 s"):
        list(stream_events(redis, "silent", timeout_s=0.1))


def ended_job(last: int = 5, journal: bool = True, entry: bool = True) -> fakeredis.FakeRedis:
    """Return a Redis with a job "j" and events 0 to `last`, whose journal or ledger entry may have expired."""
    redis = fakeredis.FakeRedis()
    for seq in range(last + 1 if journal else 0):
        redis.xadd(journal_key("j"), {"event": json.dumps(event(seq, last))}, id=stream_id(seq))
    if entry:
        redis.hset(job_key("j"), mapping={"state": "done", "next_seq": last + 1})
    return redis


@pytest.mark.parametrize("after", [5, 6, 10**6])
@pytest.mark.parametrize(("journal", "entry"), [(True, True), (True, False), (False, True)])
def test_stream_that_starts_after_the_last_event_of_a_finished_job_ends_immediately(
    after: int, journal: bool, entry: bool
) -> None:
    redis = ended_job(journal=journal, entry=entry)
    assert list(stream_events(redis, "j", after, timeout_s=0.0)) == []  # without waiting


def test_stream_ends_when_it_starts_after_the_last_event_of_the_job() -> None:
    cursor = EventCursor("j", after=7)
    assert cursor.from_page(page([])) == []
    assert [cursor.from_message(message(seq, last=5)) for seq in (4, 5)] == [[], []]
    assert cursor.ended


def test_stream_raises_immediately_when_only_the_job_entry_remains() -> None:
    redis = ended_job(journal=False)
    with pytest.raises(UnknownJob, match="has expired"):
        list(stream_events(redis, "j", timeout_s=0.0))
    with pytest.raises(StreamTrimmed, match="events 4 to 5 of job j have expired"):
        list(stream_events(redis, "j", after=3, timeout_s=0.0))


def test_stream_raises_when_redis_has_lost_a_known_job(monkeypatch: pytest.MonkeyPatch) -> None:
    redis = fakeredis.FakeRedis()
    redis.hset(job_key("j"), "state", "running")
    redis.xadd(journal_key("j"), {"event": json.dumps(event(0))}, id=stream_id(0))
    monkeypatch.setattr(reader, "GONE_S", 0.0)
    monkeypatch.setattr(reader, "QUIET_S", 0.01)
    stream = stream_events(redis, "j", timeout_s=math.inf)
    assert next(stream) == event(0)
    redis.flushall()
    with pytest.raises(UnknownJob, match="has expired"):
        next(stream)


@pytest.mark.parametrize("after", [-2, 2**63, True, 1.0, "3", None])
def test_stream_rejects_an_invalid_seq(after: Any) -> None:
    with pytest.raises(InvalidJob, match="is not the seq of an event; pass the `seq` of the last event"):
        EventCursor("j", after)


def test_stream_pings_only_while_there_are_no_events() -> None:
    redis = fakeredis.FakeRedis()
    redis.hset(job_key("j"), "state", "queued")
    redis.xadd(journal_key("j"), {"event": json.dumps(event(0))}, id=stream_id(0))
    stream = stream_events(redis, "j", ping_s=0.05)
    assert [next(stream) for _ in range(3)] == [event(0), {"type": "ping"}, {"type": "ping"}]
