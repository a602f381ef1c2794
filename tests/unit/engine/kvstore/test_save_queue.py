"""States that wait to be written: the worthiest first, within bounds, and out of the engine's way."""

from __future__ import annotations

import threading

import pytest

from cellama.engine.kvstore.counters import FIRST_GUESS, Drop, Tally
from cellama.engine.kvstore.save_queue import (
    MOST_EARNED_S,
    MOST_S,
    PATIENCE_S,
    RETURN,
    SHARE,
    WRITING_S,
    Dropped,
    SaveQueue,
    TimeBudget,
)
from cellama.engine.kvstore.states import KeptState

from ....conftest import wait_until
from .states import state_of

STATE = state_of(range(100))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """A queue with a clock that stands still."""

    def __init__(self, most_bytes: int = 1000) -> None:
        self.clock, self.tally = Clock(), Tally()
        self.queue = SaveQueue(most_bytes, self.tally, self.clock)

    def offer(self, worth_s: float, num_bytes: int = 10) -> bool:
        return self.queue.offer(STATE, worth_s, num_bytes)

    def take(self) -> float:
        """The worth of what is written next."""
        offer = self.queue.take()
        assert offer is not None
        self.queue.done(True, 0.0, 0.0)
        return offer.worth_s

    @property
    def drops(self) -> dict[str, int]:
        return dict(self.tally.snapshot(0).drops)


def test_queue_gives_the_worthiest_first_and_takes_nothing_that_is_worth_nothing() -> None:
    setup = Setup()
    assert [setup.offer(worth) for worth in (2.0, 0.0, 3.0, -1.0, 1.0, float("nan"))] == [True, False] * 3
    assert [setup.take() for _ in range(3)] == [3.0, 2.0, 1.0]
    assert setup.queue.is_idle


def test_queue_that_is_full_drops_the_least_worthy_and_holds_one_of_any_size() -> None:
    setup = Setup(most_bytes=100)
    assert setup.offer(2.0, 60)
    assert not setup.offer(1.0, 60)
    assert setup.offer(3.0, 5000)
    assert setup.drops == {Drop.QUEUE_FULL: 2}
    assert setup.take() == 3.0
    assert setup.queue.is_idle


def test_budget_beside_a_working_engine_is_a_small_share_of_the_time() -> None:
    budget = TimeBudget(0.0)
    budget.spend(MOST_S, 0.0)
    assert budget.wait_s(0.0) == 0
    budget.spend(0.002, 0.0)
    assert budget.wait_s(0.0) == pytest.approx(0.002 / SHARE)
    assert budget.wait_s(0.002 / SHARE + 1e-9) == 0
    budget.spend(0.0, 1e6)
    budget.spend(MOST_S + 1.0, 1e6)
    assert budget.wait_s(1e6) == pytest.approx(1.0 / SHARE)


def test_budget_earns_a_part_of_what_loads_save_up_to_a_bound() -> None:
    budget = TimeBudget(0.0)
    budget.spend(MOST_S + 1.0, 0.0)
    budget.earn(0.5 / RETURN)
    assert budget.wait_s(0.0) == pytest.approx(0.5 / SHARE)
    budget.earn(1e6)
    budget.earn(1e6)
    budget.spend(MOST_EARNED_S, 1e6)
    assert budget.wait_s(1e6) == 0
    budget.spend(0.1, 1e6)
    assert budget.wait_s(1e6) == pytest.approx(0.1 / SHARE)


def test_queue_goes_on_when_a_load_has_saved_time() -> None:
    setup = busy_setup()
    setup.offer(1.0)
    taken = threading.Thread(target=setup.take, daemon=True)
    taken.start()
    setup.queue.note_saved(1.0 / RETURN)
    taken.join(60)
    assert not taken.is_alive()


def busy_setup() -> Setup:
    """One that has used up its time."""
    setup = Setup()
    setup.queue.note_busy(True)
    setup.offer(1.0)
    setup.queue.take()
    setup.queue.done(True, MOST_S + 1.0, 1.0)
    return setup


def taken_by_a_thread(setup: Setup) -> list[KeptState]:
    taken: list[KeptState] = []

    def take() -> None:
        while (offer := setup.queue.take()) is not None:
            assert isinstance(offer.state, KeptState)
            taken.append(offer.state)
            setup.queue.done(True, 0.0, 0.0)

    threading.Thread(target=take, daemon=True).start()
    return taken


def test_state_that_waited_too_long_beside_a_working_engine_is_dropped() -> None:
    setup = busy_setup()
    setup.offer(1.0)
    taken = taken_by_a_thread(setup)
    setup.clock.now += PATIENCE_S + 1
    wait_until(lambda: setup.drops == {Drop.BUSY: 1}, "the state is dropped")
    setup.queue.close()
    assert not taken


@pytest.mark.parametrize("how", ["idle", "flush"])
def test_state_is_written_as_soon_as_the_engine_is_idle_or_all_shall_be_written(how: str) -> None:
    setup = busy_setup()
    setup.offer(1.0)
    taken = taken_by_a_thread(setup)
    if how == "idle":
        setup.queue.note_busy(False)
        wait_until(lambda: setup.queue.is_idle, "the state is written")
    else:
        assert setup.queue.flush(setup.clock.now + 60) == 1
    setup.queue.close()
    assert len(taken) == 1


def test_flush_waits_only_for_what_was_offered_before_it() -> None:
    setup = busy_setup()
    setup.offer(2.0)
    setup.offer(1.0)
    flush = threading.Thread(target=setup.queue.flush, args=(setup.clock.now + 60,))
    flush.start()
    assert setup.take() == 2.0  # beside a working engine: so somebody flushes
    setup.clock.now += 1
    setup.offer(5.0)
    assert setup.take() == 1.0
    flush.join(60)
    assert not flush.is_alive()
    assert not setup.queue.is_idle


def test_flush_returns_at_its_deadline_with_a_writer_that_does_nothing() -> None:
    setup = Setup()
    setup.offer(1.0)
    assert setup.queue.flush(setup.clock.now) == 0


def test_state_that_would_be_given_up_before_its_end_is_not_begun_beside_a_working_engine() -> None:
    setup = Setup(most_bytes=1 << 40)
    setup.queue.note_busy(True)
    setup.offer(9.0, 1 << 34)
    setup.offer(1.0, 1000)
    assert setup.take() == 1.0
    setup.queue.note_busy(False)
    assert setup.take() == 9.0


def test_state_is_begun_beside_a_working_engine_only_if_what_is_left_and_comes_in_is_enough() -> None:
    for left_s, is_begun in ((MOST_S, True), (0.0, False)):
        setup = Setup(most_bytes=1 << 40)
        setup.queue.note_busy(True)
        setup.offer(1.0, 0)
        assert setup.take() == 1.0
        setup.queue.done(False, MOST_S - left_s, 0.0)
        setup.offer(9.0, int((SHARE * WRITING_S + MOST_S / 2) * FIRST_GUESS))
        setup.offer(1.0, 1000)
        assert setup.take() == (9.0 if is_begun else 1.0)


def test_writing_is_given_up_when_the_engine_works_for_too_long_or_the_queue_closes() -> None:
    setup = Setup()
    setup.offer(1.0)
    setup.clock.now += PATIENCE_S
    assert setup.queue.take() is not None
    setup.queue.pause(100.0)  # idle: as much as it wants
    setup.queue.note_busy(True)
    setup.queue.pause(MOST_S)
    setup.clock.now += WRITING_S
    with pytest.raises(Dropped, match="busy"):
        setup.queue.pause(100.0)
    setup.queue.close()
    with pytest.raises(Dropped, match="closed"):
        setup.queue.pause(0.0)
    assert setup.queue.take() is None
    assert not setup.offer(1.0)
