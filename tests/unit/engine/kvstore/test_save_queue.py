"""Tests of the queue of states to write: order, limits, and the credit for writing during computation."""

from __future__ import annotations

import threading

import pytest

from cellama.engine.kvstore.states import StoreCounters
from cellama.engine.kvstore.writer import CREDIT_SHARE, MAX_CREDIT_S, RETURNED_SHARE, SaveQueue, WriteCredit

from ....conftest import wait_until


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """A queue with a clock that does not advance by itself."""

    def __init__(self, max_bytes: int = 1000) -> None:
        self.clock, self.counters = Clock(), StoreCounters()
        self.queue = SaveQueue(max_bytes, self.counters, self.clock)

    def offer(self, saved_s: float, num_bytes: int = 10) -> bool:
        return self.queue.offer(lambda: None, saved_s, num_bytes)

    def take(self, core_s: float = 0.0) -> float | None:
        """Take and finish the next state, and return its saving; None if no state may be written."""
        offer = self.queue.take(0.0)
        if offer is None:
            return None
        self.queue.done(True, core_s)
        return offer.expected_saved_s

    def write_all(self) -> threading.Thread:
        """Start a thread that writes until the queue is closed."""

        def write() -> None:
            while not self.queue.is_closed:
                if self.queue.take(60.0) is not None:
                    self.queue.done(True, 0.0)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        return writer


def in_debt(debt_s: float = 1.0) -> Setup:
    """Return a queue of a computing engine whose credit is used up."""
    setup = Setup()
    setup.queue.note_busy(True)
    setup.offer(1.0)
    assert setup.take(MAX_CREDIT_S + debt_s) == 1.0
    return setup


def test_queue_orders_states_by_time_saved_and_rejects_states_that_save_no_time() -> None:
    setup = Setup()
    assert [setup.offer(saved) for saved in (2.0, 0.0, 3.0, -1.0, 1.0, float("nan"))] == [True, False] * 3
    assert [setup.take() for _ in range(4)] == [3.0, 2.0, 1.0, None]
    assert setup.queue.is_idle


def test_full_queue_drops_the_least_useful_state_and_holds_one_state_of_any_size() -> None:
    setup = Setup(max_bytes=100)
    assert setup.offer(2.0, 60)
    assert not setup.offer(1.0, 60)
    assert setup.offer(2.0, 60)  # drops the oldest of equal savings
    assert setup.offer(3.0, 5000)
    assert setup.counters.drops == 3
    assert setup.take() == 3.0
    assert setup.queue.is_idle


def test_credit_grows_with_time_up_to_a_limit() -> None:
    credit = WriteCredit(0.0)
    credit.add(-MAX_CREDIT_S, 0.0)
    assert credit.wait_s(0.0) == 0
    credit.add(-0.002, 0.0)
    assert credit.wait_s(0.0) == pytest.approx(0.002 / CREDIT_SHARE)
    assert credit.wait_s(0.002 / CREDIT_SHARE + 1e-9) == 0
    credit.add(-MAX_CREDIT_S - 1.0, 1e6)
    assert credit.wait_s(1e6) == pytest.approx(1.0 / CREDIT_SHARE)


def test_state_is_written_during_computation_when_there_is_credit() -> None:
    setup = in_debt(1.0)
    setup.offer(1.0)
    assert setup.take() is None
    setup.clock.now += 0.9 / CREDIT_SHARE
    assert setup.take() is None
    setup.clock.now += 0.2 / CREDIT_SHARE
    assert setup.take() == 1.0


def test_loading_a_state_adds_the_time_saved_to_the_credit() -> None:
    setup = in_debt(1.0)
    setup.offer(1.0)
    setup.queue.note_saved(0.9 / RETURNED_SHARE)
    assert setup.take() is None
    setup.queue.note_saved(0.2 / RETURNED_SHARE)
    assert setup.take() == 1.0


def test_state_is_written_immediately_when_the_engine_becomes_idle() -> None:
    setup = in_debt()
    setup.offer(1.0)
    writer = setup.write_all()
    setup.queue.note_busy(False)
    wait_until(lambda: setup.queue.is_idle, "the state is written")
    setup.queue.close()
    writer.join(60)
    assert not writer.is_alive()


def test_flush_writes_during_computation_without_using_credit() -> None:
    setup = in_debt()
    for saved in (1.0, 2.0):
        setup.offer(saved)
    writer = setup.write_all()
    assert setup.queue.flush(setup.clock.now + 60) == 2
    setup.offer(3.0)
    setup.clock.now += 1.1 / CREDIT_SHARE
    setup.queue.note_saved(0.0)
    wait_until(lambda: setup.queue.is_idle, "the debt is paid")
    setup.queue.close()
    writer.join(60)


def test_flush_waits_only_for_states_offered_before_the_call() -> None:
    setup = in_debt()
    setup.offer(2.0)
    setup.offer(1.0)
    flush = threading.Thread(target=setup.queue.flush, args=(setup.clock.now + 60,))
    flush.start()
    wait_until(lambda: setup.take() == 2.0, "the flush")
    setup.offer(5.0)
    assert setup.take() == 1.0
    flush.join(60)
    assert not flush.is_alive()
    assert not setup.queue.is_idle


def test_flush_returns_at_its_deadline_when_nothing_is_written() -> None:
    setup = Setup()
    setup.offer(1.0)
    assert setup.queue.flush(setup.clock.now) == 0


def test_closed_queue_drops_waiting_states_and_rejects_new_states() -> None:
    setup = Setup()
    setup.offer(1.0)
    setup.queue.close()
    assert setup.counters.drops == 1
    assert setup.take() is None
    assert not setup.offer(1.0)
