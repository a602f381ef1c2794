"""One connection serves the channels of all readers, while readers join and leave and connections are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import pytest
from redis.exceptions import AuthenticationError, ConnectionError as RedisConnectionError, NoPermissionError

from cellama.tasks.live import subscriptions as module
from cellama.tasks.live.subscriptions import Mailbox, Signal, Subscriptions

from .wires import ScriptedWire, Wires, settle

LATE_S = 60.0


def with_wires(*script: ScriptedWire | Exception) -> Callable[[Callable[[Subscriptions], Awaitable[None]]], None]:
    """Run the body with subscriptions over these connections, and check that they are released afterwards."""

    def run(body: Callable[[Subscriptions], Awaitable[None]]) -> None:
        async def main() -> None:
            subscriptions = Subscriptions(Wires(*script).connect)
            await body(subscriptions)
            await subscriptions.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert all(wire.is_closed for wire in script if isinstance(wire, ScriptedWire) and wire.sent)

        asyncio.run(main())

    return run


async def news(box: Mailbox) -> list[bytes] | Signal:
    return await box.get(LATE_S)


def test_readers_that_join_at_the_same_time_are_subscribed_with_one_command() -> None:
    wire = ScriptedWire()

    @with_wires(wire)
    async def _(subscriptions: Subscriptions) -> None:
        with ExitStack() as stack:
            boxes = [stack.enter_context(subscriptions.mailbox(f"c{n % 10}")) for n in range(20)]
            assert [await news(box) for box in boxes] == [Signal.SUBSCRIBED] * 20
            late = stack.enter_context(subscriptions.mailbox("late"))
            assert await news(late) is Signal.SUBSCRIBED
        assert wire.commands(b"SUBSCRIBE") == [{b"c%d" % n for n in range(10)}, {b"late"}]


def test_message_reaches_only_the_readers_of_its_channel() -> None:
    wire = ScriptedWire()

    @with_wires(wire)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as one, subscriptions.mailbox("a") as two, subscriptions.mailbox("b") as other:
            assert [await news(box) for box in (one, two, other)] == [Signal.SUBSCRIBED] * 3
            wire.publish(b"a", b"1")
            wire.publish(b"b", b"2")
            wire.publish(b"a", b"3")
            assert [await news(box) for box in (one, two, other)] == [[b"1", b"3"], [b"1", b"3"], [b"2"]]
            with subscriptions.mailbox("a") as third:  # subscribed already
                assert await news(third) is Signal.SUBSCRIBED


def test_channel_is_unsubscribed_when_its_last_reader_leaves() -> None:
    wire = ScriptedWire()

    @with_wires(wire)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("stays"), subscriptions.mailbox("a") as one:
            with subscriptions.mailbox("a"):
                await news(one)
            await settle()
            assert wire.channels == {b"stays", b"a"}
            one_more = subscriptions.mailbox("a")
            one_more.__enter__()
        await settle()
        assert wire.channels == {b"a"}
        one_more.__exit__(None, None, None)
        await asyncio.sleep(0)
        assert wire.channels == set()


def test_reader_waits_for_a_new_subscription_when_it_joins_after_the_last_reader_left() -> None:
    """An older confirmation does not count, because the channel was unsubscribed after it."""
    wire = ScriptedWire(confirms=False)

    @with_wires(wire)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a"):
            await settle(lambda: wire.commands(b"SUBSCRIBE"))
        await settle(lambda: wire.commands(b"UNSUBSCRIBE"))
        with subscriptions.mailbox("a") as box:
            await settle(lambda: len(wire.commands(b"SUBSCRIBE")) == 2)
            wire.confirm([b"SUBSCRIBE", b"a"])
            wire.confirm([b"UNSUBSCRIBE", b"a"])
            assert await box.get(0.001) is Signal.SILENCE
            wire.confirm([b"SUBSCRIBE", b"a"])
            assert await news(box) is Signal.SUBSCRIBED


def test_lost_connection_is_reopened_and_every_reader_is_notified() -> None:
    first, second = ScriptedWire(), ScriptedWire()

    @with_wires(first, second)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as one, subscriptions.mailbox("b") as two:
            for wire in (first, second):
                assert [await news(box) for box in (one, two)] == [Signal.SUBSCRIBED] * 2
                assert wire.commands(b"SUBSCRIBE") == [{b"a", b"b"}]
                wire.publish(b"a", b"1")
                assert await news(one) == [b"1"]
                if wire is first:
                    first.abort()
            assert first.is_closed


def test_reader_that_joins_during_a_reconnect_is_subscribed_with_the_other_readers() -> None:
    first, second = ScriptedWire(), ScriptedWire(confirms=False)

    @with_wires(first, second)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as one:
            await news(one)
            first.abort()
            await settle(lambda: first.is_closed)
            with subscriptions.mailbox("a") as two:
                await settle(lambda: second.sent)
                assert await two.get(0.001) is Signal.SILENCE
                second.confirm([b"SUBSCRIBE", b"a"])
                assert [await news(box) for box in (one, two)] == [Signal.SUBSCRIBED] * 2


@pytest.mark.parametrize("error", [RedisConnectionError("refused"), AuthenticationError("no"), NoPermissionError("no")])
def test_connection_error_reaches_every_reader_and_the_next_reader_reconnects(error: Exception) -> None:
    last, refusing = ScriptedWire(), ScriptedWire(confirms=False)
    refusing.reply(error)
    script = [refusing, last] if isinstance(error, NoPermissionError) else [error, last]

    @with_wires(*script)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as one, subscriptions.mailbox("b") as two:
            for box in (one, two):
                with pytest.raises(type(error)):
                    await news(box)
            with subscriptions.mailbox("a") as three:
                assert await news(three) is Signal.SUBSCRIBED
        assert last.commands(b"SUBSCRIBE") == [{b"a"}]


def test_readers_of_closed_subscriptions_get_an_error_that_is_not_retried() -> None:
    @with_wires(ScriptedWire())
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as box:
            await news(box)
            await subscriptions.close()
            with pytest.raises(RuntimeError, match="the client was closed"):
                await news(box)


def test_reader_raises_when_subscriptions_are_closed_before_they_start() -> None:
    @with_wires()
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as box:
            await subscriptions.close()
            with pytest.raises(RuntimeError, match="the client was closed"):
                await box.get(0.0)


def test_connection_is_reopened_when_pings_get_no_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    first, second = ScriptedWire(), ScriptedWire()

    @with_wires(first, second)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as box:
            assert [await news(box), await news(box)] == [Signal.SUBSCRIBED] * 2
            assert (b"PING",) in map(tuple, first.sent)
            assert first.is_closed
            monkeypatch.setattr(module, "TICK_S", 60.0)


def test_connection_without_readers_is_closed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "TICK_S", 0.001)
    first, second = ScriptedWire(), ScriptedWire()

    @with_wires(first, second)
    async def _(subscriptions: Subscriptions) -> None:
        with subscriptions.mailbox("a") as box:
            await news(box)
            first.reply(b"PONG")
        await asyncio.wait_for(first.closed.wait(), LATE_S)
        with subscriptions.mailbox("b") as box:
            assert await news(box) is Signal.SUBSCRIBED
        assert second.commands(b"SUBSCRIBE") == [{b"b"}]
        assert caplog.messages == []  # no message was lost
