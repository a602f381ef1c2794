"""A mailbox holds the unread messages of one reader, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cellama.tasks.live.subscriptions import MAX_UNREAD_BYTES, Mailbox, Signal

SOON_S, LATE_S = 0.001, 60.0


def with_mailbox(body: Callable[[Mailbox], Awaitable[None]]) -> None:
    async def run() -> None:
        await body(Mailbox(b"c"))

    asyncio.run(run())


def test_mailbox_returns_all_messages_in_order() -> None:
    async def body(box: Mailbox) -> None:
        box.put(b"a")
        box.put(b"b")
        assert await box.get(LATE_S) == [b"a", b"b"]
        assert await box.get(SOON_S) is Signal.SILENCE

    with_mailbox(body)


def test_mailbox_wakes_its_reader_for_messages_and_signals() -> None:
    async def body(box: Mailbox) -> None:
        for come, found in ((lambda: box.put(b"a"), [b"a"]), (box.subscribed, Signal.SUBSCRIBED)):
            reading = asyncio.ensure_future(box.get(LATE_S))
            await asyncio.sleep(0)
            come()
            assert await reading == found

    with_mailbox(body)


def test_full_mailbox_drops_all_messages_and_reports_the_loss_once() -> None:
    async def body(box: Mailbox) -> None:
        for _ in range(MAX_UNREAD_BYTES // 1000 + 1):
            box.put(b"x" * 1000)
        box.put(b"later")
        assert await box.get(LATE_S) is Signal.LAGGED
        box.put(b"new")
        assert await box.get(LATE_S) == [b"new"]

    with_mailbox(body)


def test_mailbox_drops_a_message_larger_than_its_limit() -> None:
    async def body(box: Mailbox) -> None:
        box.put(b"x" * (MAX_UNREAD_BYTES + 1))
        assert await box.get(LATE_S) is Signal.LAGGED

    with_mailbox(body)


def test_mailbox_reports_a_new_subscription_before_any_message() -> None:
    async def body(box: Mailbox) -> None:
        box.put(b"old")
        box.subscribed()
        for _ in range(MAX_UNREAD_BYTES // 1000 + 1):
            box.put(b"x" * 1000)
        box.put(b"new")
        assert await box.get(LATE_S) is Signal.SUBSCRIBED
        assert await box.get(LATE_S) == [b"new"]

    with_mailbox(body)


def test_failed_mailbox_raises_its_error_on_every_get_call() -> None:
    async def body(box: Mailbox) -> None:
        box.put(b"a")
        box.fail(RuntimeError("closed"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="closed"):
                await box.get(LATE_S)

    with_mailbox(body)


def test_mailbox_uses_one_timer_for_all_waits_and_finally_cancels_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(box: Mailbox) -> None:
        loop, timers = asyncio.get_running_loop(), []
        monkeypatch.setattr(loop, "call_at", lambda *args, make=loop.call_at: timers.append(make(*args)) or timers[-1])
        for _ in range(10):
            reading = asyncio.ensure_future(box.get(LATE_S))
            await asyncio.sleep(0)
            box.put(b"a")
            await reading
        box.stop()
        assert [timer.cancelled() for timer in timers] == [True]

    with_mailbox(body)
