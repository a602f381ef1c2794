"""Streams over shared connections: every event once and in order, whatever becomes of connections and readers."""

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
from cellama.tasks.state.reader import PAGE

from .wires import ScriptedWire, settle

JOB, CHANNEL = "j", events_channel("j", 0).encode()


class Server:
    """A Redis with the journal of one job; what is published reaches the wire of the moment."""

    def __init__(self) -> None:
        self.redis = fakeredis.FakeAsyncRedis()
        self.wire = ScriptedWire()
        self.num_events = 0
        self.streams = Streams(self.redis, self._connect)

    async def _connect(self) -> ScriptedWire:
        self.wire = ScriptedWire()
        return self.wire

    async def tell(self, count: int = 1, ends: bool = False, lost: bool = False) -> None:
        """`lost`: pub/sub does not bring them."""
        for place in range(count):
            kind = "done" if ends and place == count - 1 else "token"
            await self.say({"seq": self.num_events, "type": kind, "text": "x" * 100}, lost)

    async def say(self, event: dict[str, Any], lost: bool = False) -> None:
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


ACTIONS = st.sampled_from(["tell", "lose", "many", "break", "read", "settle"])


@given(st.lists(ACTIONS, max_size=12), st.integers(-1, 5))
def test_stream_brings_each_event_once_in_order_whatever_happens(actions: list[str], after: int) -> None:
    async def body(server: Server) -> None:
        may_read = asyncio.Semaphore(1)

        async def read() -> list[int]:
            got = []
            async for event in server.streams.events(JOB, after):
                await may_read.acquire()
                got.append(event["seq"])
            return got

        await server.tell(2)
        reading = asyncio.create_task(read())
        for action in actions:
            if action in ("tell", "lose", "many"):
                await server.tell(50 if action == "many" else 1, lost=action == "lose")
            elif action == "break":
                server.wire.abort()
            elif action == "read":
                may_read.release()
            else:
                await settle()
        await server.tell(8, ends=True)
        for _ in range(server.num_events):
            may_read.release()
        assert await reading == list(range(after + 1, server.num_events))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subscriptions, "MAX_UNREAD_BYTES", 1000)  # a few events
        patch.setattr(reader, "QUIET_S", 0.01)
        with_server(body)


def test_slow_reader_keeps_a_bounded_part_of_what_it_has_not_read() -> None:
    async def body(server: Server) -> None:
        stream = server.streams.events(JOB)
        await server.tell()
        assert (await anext(stream))["seq"] == 0
        (box,) = server.streams._subscriptions._boxes[CHANNEL]
        for _ in range(10):
            await server.tell(PAGE)
            await settle()
            assert sum(map(len, box._messages)) <= subscriptions.MAX_UNREAD_BYTES
        await server.tell(ends=True)
        assert await seqs(stream) == list(range(1, server.num_events))

    with_server(body)


def test_reader_that_is_cancelled_gives_its_channel_up_at_once_and_others_read_on() -> None:
    async def body(server: Server) -> None:
        await server.tell()
        readers = [asyncio.create_task(seqs(server.streams.events(JOB))) for _ in range(2)]
        await settle(lambda: CHANNEL in server.wire.channels)
        readers[0].cancel()
        await settle(readers[0].done)
        assert CHANNEL in server.wire.channels
        await server.tell(3, ends=True)
        assert await readers[1] == [0, 1, 2, 3]
        await settle(lambda: CHANNEL not in server.wire.channels)
        assert not server.wire.channels

    with_server(body)


def test_many_readers_ask_for_their_journals_in_few_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server) -> None:
        trips = []
        monkeypatch.setattr(
            server.redis, "pipeline", lambda make=server.redis.pipeline, **how: trips.append(1) or make(**how)
        )
        await server.tell(3, ends=True)
        read = await asyncio.gather(*(seqs(server.streams.events(JOB)) for _ in range(100)))
        assert read == [[0, 1, 2]] * 100
        assert len(trips) <= 5

    with_server(body)


def test_stream_says_so_when_redis_has_other_events_after_a_failover() -> None:
    async def body(server: Server) -> None:
        await server.tell(3)
        stream = server.streams.events(JOB)
        for _ in range(3):
            await anext(stream)
        await server.redis.delete(journal_key(JOB))
        for seq in range(3):
            await server.say({"seq": seq, "type": "token", "text": f"other {seq}"}, lost=True)
        server.wire.abort()
        with pytest.raises(StreamTrimmed, match="others stand in their place"):
            await anext(stream)

    with_server(body)


def test_stream_of_a_silent_job_pings_until_its_time_is_over() -> None:
    async def body(server: Server) -> None:
        await server.redis.hset(job_key(JOB), "state", "queued")
        stream = server.streams.events(JOB, ping_s=0.05)
        assert [await anext(stream) for _ in range(2)] == [{"type": "ping"}] * 2
        await stream.aclose()  # type: ignore[attr-defined]
        with pytest.raises(JobTimeout, match=r"told nothing for 0\.2 s"):
            await seqs(server.streams.events(JOB, timeout_s=0.2, ping_s=0.05))

    with_server(body)


def test_stream_of_an_unknown_job_raises_unknown_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server) -> None:
        with pytest.raises(UnknownJob, match="there is no job j"):
            await seqs(server.streams.events(JOB))
        await server.redis.hset(job_key(JOB), mapping={"state": "done", "next_seq": 3})  # it has outlived its events
        with pytest.raises(UnknownJob, match="not any more"):
            await seqs(server.streams.events(JOB))
        with pytest.raises(StreamTrimmed, match="events 1 to 2 of job j are gone"):
            await seqs(server.streams.events(JOB, after=0))

    monkeypatch.setattr(reader, "UNKNOWN_S", 0.01)
    monkeypatch.setattr(reader, "QUIET_S", 0.01)
    with_server(body)


def test_stream_after_the_last_event_of_an_ended_job_ends_at_once() -> None:
    async def body(server: Server) -> None:
        await server.tell(6, ends=True)
        for after in (5, 6, 10**6):
            assert await seqs(server.streams.events(JOB, after)) == []
        await server.redis.hset(job_key(JOB), mapping={"state": "done", "next_seq": 6})
        await server.redis.delete(journal_key(JOB))
        assert await seqs(server.streams.events(JOB, 5)) == []

    with_server(body)


def test_stream_whose_job_ends_below_after_ends_with_it() -> None:
    async def body(server: Server) -> None:
        await server.redis.hset(job_key(JOB), "state", "running")
        reading = asyncio.create_task(seqs(server.streams.events(JOB, after=7)))
        await settle(lambda: CHANNEL in server.wire.channels)
        await settle()
        assert not reading.done()
        await server.tell(6, ends=True)
        assert await reading == []

    with_server(body)


def test_stream_of_a_job_that_redis_has_lost_ends_although_it_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(server: Server) -> None:
        await server.tell()
        stream = server.streams.events(JOB, timeout_s=math.inf)
        assert (await anext(stream))["seq"] == 0
        await server.redis.flushall()
        with pytest.raises(UnknownJob, match="not any more"):
            await anext(stream)

    monkeypatch.setattr(reader, "GONE_S", 0.0)
    monkeypatch.setattr(reader, "QUIET_S", 0.01)
    with_server(body)


def test_closed_streams_end_their_readers_with_an_error() -> None:
    async def body(server: Server) -> None:
        await server.tell()
        stream = server.streams.events(JOB)
        await anext(stream)
        reading = asyncio.ensure_future(anext(stream))
        await settle()
        await server.streams.close()
        with pytest.raises(RuntimeError, match="the client was closed"):
            await reading

    with_server(body)


def test_look_into_a_journal_that_is_closed_before_it_has_begun_gets_the_error_too() -> None:
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


def test_tick_is_long_enough_for_a_busy_loop() -> None:
    """A loop that computes for a while must not take its own connection for dead."""
    assert subscriptions.TICK_S * subscriptions.MAX_SILENT_TICKS >= 10
