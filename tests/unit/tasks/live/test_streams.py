"""Streams over shared connections yield every event once and in order, even if connections or readers fail."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import fakeredis
import pytest
from hypothesis import given, strategies as st

from cellama.tasks.contract.errors import JobTimeout, StreamTrimmed, UnknownJob
from cellama.tasks.contract.keys import events_channel, job_key, journal_key, stream_id
from cellama.tasks.live import subscriptions
from cellama.tasks.live.streams import Streams
from cellama.tasks.state import reader
from cellama.tasks.state.reader import PAGE_ENTRIES

from .wires import ScriptedWire, settle

JOB, CHANNEL = "j", events_channel("j", 0).encode()


class Server:
    """A Redis with the journal of one job, whose published events reach the current connection."""

    def __init__(self) -> None:
        self.redis = fakeredis.FakeAsyncRedis()
        self.wire = ScriptedWire()
        self.num_events = 0
        self.streams = Streams(self.redis, self._connect)

    async def _connect(self) -> ScriptedWire:
        self.wire = ScriptedWire()
        return self.wire

    async def write_events(self, count: int = 1, ends: bool = False, lost: bool = False) -> None:
        """Write events to the journal, and publish them unless they are `lost`."""
        for index in range(count):
            kind = "done" if ends and index == count - 1 else "token"
            await self.write_event({"seq": self.num_events, "type": kind, "text": "x" * 100}, lost)

    async def write_event(self, event: dict[str, Any], lost: bool = False) -> None:
        data = json.dumps(event)
        await self.redis.xadd(journal_key(JOB), {"event": data}, id=stream_id(event["seq"]))
        self.num_events = event["seq"] + 1
        if not lost:
            self.wire.publish(CHANNEL, data.encode())


def with_server(body: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        server = Server()
        await body(server)
        await server.streams.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


async def seqs(stream: AsyncIterator[Any]) -> list[int]:
    return [event.get("seq", -1) async for event in stream]


ACTIONS = st.sampled_from(["write_events", "lose", "many", "break", "read", "settle"])


@given(st.lists(ACTIONS, max_size=12), st.integers(-1, 5))
def test_stream_yields_each_event_once_in_order_despite_faults(actions: list[str], after: int) -> None:
    async def body(server: Server) -> None:
        may_read = asyncio.Semaphore(1)

        async def read() -> list[int]:
            got = []
            async for event in server.streams.events(JOB, after):
                await may_read.acquire()
                got.append(event["seq"])
            return got

        await server.write_events(2)
        reading = asyncio.create_task(read())
        for action in actions:
            if action in ("write_events", "lose", "many"):
                await server.write_events(50 if action == "many" else 1, lost=action == "lose")
            elif action == "break":
                server.wire.abort()
            elif action == "read":
                may_read.release()
            else:
                await settle()
        await server.write_events(8, ends=True)
        for _ in range(server.num_events):
            may_read.release()
        assert await reading == list(range(after + 1, server.num_events))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subscriptions, "MAX_UNREAD_BYTES", 1000)  # a few events
        patch.setattr(reader, "QUIET_S", 0.01)
        with_server(body)


def test_slow_reader_buffers_a_limited_number_of_unread_bytes() -> None:
    async def body(server: Server) -> None:
        stream = server.streams.events(JOB)
        await server.write_events()
        assert (await anext(stream))["seq"] == 0
        (box,) = server.streams._subscriptions._boxes[CHANNEL]
        for _ in range(10):
            await server.write_events(PAGE_ENTRIES)
            await settle()
            assert sum(map(len, box._messages)) <= subscriptions.MAX_UNREAD_BYTES
        await server.write_events(ends=True)
        assert await seqs(stream) == list(range(1, server.num_events))

    with_server(body)


def test_cancelled_reader_releases_its_channel_and_other_readers_continue() -> None:
    async def body(server: Server) -> None:
        await server.write_events()
        readers = [asyncio.create_task(seqs(server.streams.events(JOB))) for _ in range(2)]
        await settle(lambda: CHANNEL in server.wire.channels)
        readers[0].cancel()
        await settle(readers[0].done)
        assert CHANNEL in server.wire.channels
        await server.write_events(3, ends=True)
        assert await readers[1] == [0, 1, 2, 3]
        await settle(lambda: CHANNEL not in server.wire.channels)
        assert not server.wire.channels

    with_server(body)


def test_many_readers_read_their_journals_in_few_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server) -> None:
        trips = []
        monkeypatch.setattr(
            server.redis, "pipeline", lambda make=server.redis.pipeline, **how: trips.append(1) or make(**how)
        )
        await server.write_events(3, ends=True)
        read = await asyncio.gather(*(seqs(server.streams.events(JOB)) for _ in range(100)))
        assert read == [[0, 1, 2]] * 100
        assert len(trips) <= 5

    with_server(body)


def test_stream_raises_when_redis_has_different_events_after_a_failover() -> None:
    async def body(server: Server) -> None:
        await server.write_events(3)
        stream = server.streams.events(JOB)
        for _ in range(3):
            await anext(stream)
        await server.redis.delete(journal_key(JOB))
        for seq in range(3):
            await server.write_event({"seq": seq, "type": "token", "text": f"other {seq}"}, lost=True)
        server.wire.abort()
        with pytest.raises(StreamTrimmed, match="other events have replaced them"):
            await anext(stream)

    with_server(body)


def test_stream_of_a_silent_job_pings_until_its_timeout() -> None:
    async def body(server: Server) -> None:
        await server.redis.hset(job_key(JOB), "state", "queued")
        stream = server.streams.events(JOB, ping_s=0.05)
        assert [await anext(stream) for _ in range(2)] == [{"type": "ping"}] * 2
        await stream.aclose()  # type: ignore[attr-defined]
        with pytest.raises(JobTimeout, match=r"no events from job \S+ for 0\.2 s"):
            await seqs(server.streams.events(JOB, timeout_s=0.2, ping_s=0.05))

    with_server(body)


def test_stream_of_an_unknown_job_raises_unknown_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server) -> None:
        with pytest.raises(UnknownJob, match="job j is unknown"):
            await seqs(server.streams.events(JOB))
        await server.redis.hset(job_key(JOB), mapping={"state": "done", "next_seq": 3})  # without events
        with pytest.raises(UnknownJob, match="has expired"):
            await seqs(server.streams.events(JOB))
        with pytest.raises(StreamTrimmed, match="events 1 to 2 of job j have expired"):
            await seqs(server.streams.events(JOB, after=0))

    monkeypatch.setattr(reader, "UNKNOWN_S", 0.01)
    monkeypatch.setattr(reader, "QUIET_S", 0.01)
    with_server(body)


def test_stream_that_starts_after_the_last_event_of_a_finished_job_ends_immediately() -> None:
    async def body(server: Server) -> None:
        await server.write_events(6, ends=True)
        for after in (5, 6, 10**6):
            assert await seqs(server.streams.events(JOB, after)) == []
        await server.redis.hset(job_key(JOB), mapping={"state": "done", "next_seq": 6})
        await server.redis.delete(journal_key(JOB))
        assert await seqs(server.streams.events(JOB, 5)) == []

    with_server(body)


def test_stream_ends_when_the_job_ends_before_the_requested_event() -> None:
    async def body(server: Server) -> None:
        await server.redis.hset(job_key(JOB), "state", "running")
        reading = asyncio.create_task(seqs(server.streams.events(JOB, after=7)))
        await settle(lambda: CHANNEL in server.wire.channels)
        await settle()
        assert not reading.done()
        await server.write_events(6, ends=True)
        assert await reading == []

    with_server(body)


def test_stream_ends_when_redis_loses_a_known_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server) -> None:
        await server.write_events()
        stream = server.streams.events(JOB, timeout_s=math.inf)
        assert (await anext(stream))["seq"] == 0
        await server.redis.flushall()
        with pytest.raises(UnknownJob, match="has expired"):
            await anext(stream)

    monkeypatch.setattr(reader, "GONE_S", 0.0)
    monkeypatch.setattr(reader, "QUIET_S", 0.01)
    with_server(body)


def test_closed_streams_raise_in_their_readers() -> None:
    async def body(server: Server) -> None:
        await server.write_events()
        stream = server.streams.events(JOB)
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await settle()
        await server.streams.close()
        with pytest.raises(RuntimeError, match="the client was closed"):
            await reading

    with_server(body)


def test_reading_a_journal_raises_when_the_client_is_closed_before_it_starts() -> None:
    async def body(server: Server) -> None:
        journals = server.streams._journals
        reading = asyncio.create_task(journals.read(JOB, "-"))
        await asyncio.sleep(0)
        await journals.close()
        await settle(reading.done)
        assert reading.done()
        with pytest.raises(RuntimeError, match="the client was closed"):
            await reading

    with_server(body)


def test_silence_limit_exceeds_the_delays_of_a_busy_event_loop() -> None:
    """A busy event loop must not consider its own connection dead."""
    assert subscriptions.TICK_S * subscriptions.MAX_SILENT_TICKS >= 10
