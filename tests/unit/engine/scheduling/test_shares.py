"""Waiting sequences with the same priority share the slots by fairness key."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from cellama.engine import InvalidRequest, Share
from cellama.engine.scheduling import shares
from cellama.engine.scheduling.scheduler import Limits, Scheduler
from cellama.engine.scheduling.sequence import Sequence, State

from .schedulers import new_scheduler, run_step, sequence


def of_key(key: str, *weights: float, max_tokens: int = 5, prefill_cost: float = 0.1, **params: Any) -> Sequence:
    share = Share(key, weights, prefill_cost)
    return sequence(share=share, max_tokens=max_tokens, **{"cache_prompt": False, **params})


class Served:
    """Runs steps until sequences end, and records the keys of the sequences in the order in which they got slots."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.keys: list[str] = []
        self.service: Counter[str] = Counter()  # generated tokens by key
        self._seen: set[Sequence] = set()

    def step(self) -> None:
        before = {s: s.num_output for s in self.scheduler.slots.running}
        run_step(self.scheduler)
        for running in self.scheduler.slots.running:
            key = running.request.share.key
            self.service[key] += running.num_output - before.get(running, 0)
            if running not in self._seen:
                self._seen.add(running)
                self.keys.append(key)
            if running.num_output >= running.request.max_tokens:
                self.scheduler.release(running)

    def take(self, count: int) -> Counter[str]:
        """Run steps until `count` more sequences have got slots, and return their keys."""
        start = len(self.keys)
        while len(self.keys) < start + count:
            self.step()
        return Counter(self.keys[start : start + count])


def served(scheduler: Scheduler, *waiting: Sequence) -> Served:
    for each in waiting:
        scheduler.enqueue(each, 0)
    return Served(scheduler)


def test_keys_take_turns_even_if_one_key_has_many_older_sequences() -> None:
    waiting = served(new_scheduler(n_slots=1), *(of_key("a") for _ in range(20)), *(of_key("b") for _ in range(3)))
    assert waiting.take(6) == {"a": 3, "b": 3}
    assert waiting.take(6) == {"a": 6}


def test_free_slots_are_divided_between_keys_immediately() -> None:
    scheduler = new_scheduler(n_slots=4)
    served(scheduler, *(of_key("a") for _ in range(20)), *(of_key("b") for _ in range(20)))
    assert Counter(s.request.share.key for s in scheduler.admit(0)) == {"a": 2, "b": 2}


def test_sequences_of_one_key_keep_their_order() -> None:
    scheduler = new_scheduler(n_slots=1)
    waiting = [of_key("a", max_tokens=length) for length in (9, 1, 5)]
    for each in waiting:
        scheduler.enqueue(each, 0)
    for each in waiting:
        assert scheduler.admit(0) == [each]
        scheduler.release(each)


def test_long_sequences_cost_more_service_than_short_sequences() -> None:
    long = [of_key("long", max_tokens=20, prefill_cost=0) for _ in range(30)]
    short = [of_key("short", max_tokens=5, prefill_cost=0) for _ in range(90)]
    waiting = served(new_scheduler(n_slots=2), *long, *short)
    waiting.take(60)
    assert waiting.service["long"] == pytest.approx(waiting.service["short"], rel=0.15)


def test_slots_are_divided_according_to_weights() -> None:
    waiting = served(
        new_scheduler(n_slots=1), *(of_key("a", 3) for _ in range(40)), *(of_key("b", 1) for _ in range(40))
    )
    assert waiting.take(40)["a"] in (29, 30, 31)


def test_many_keys_below_one_parent_gain_no_advantage() -> None:
    crowd = [of_key(f"crowd/{number}") for number in range(50)]
    keys = served(new_scheduler(n_slots=1), *crowd, *(of_key("alone") for _ in range(50))).take(40)
    assert keys["alone"] == 20


def test_returning_key_is_not_compensated_for_its_absence() -> None:
    scheduler = new_scheduler(n_slots=1)
    waiting = served(scheduler, of_key("away"), *(of_key("busy") for _ in range(60)))
    waiting.take(30)
    for _ in range(20):
        scheduler.enqueue(of_key("away"), 0)
    assert waiting.take(20)["away"] in (10, 11)


def test_more_urgent_sequences_are_admitted_first_regardless_of_service() -> None:
    scheduler = new_scheduler(n_slots=1)
    waiting = served(scheduler, *(of_key("a", priority=2) for _ in range(4)), of_key("b", priority=4))
    assert waiting.take(5) == {"a": 4, "b": 1}
    assert waiting.keys[-1] == "b"


@pytest.mark.parametrize("ram_bytes", [0, 10_000])
def test_sequence_of_the_key_with_the_most_service_is_preempted(ram_bytes: int) -> None:
    scheduler = new_scheduler(n_slots=3, ram_bytes=ram_bytes)
    rich, poor = [of_key("rich", priority=9, max_tokens=30) for _ in range(2)], of_key("poor", priority=9)
    for each in rich:
        scheduler.enqueue(each, 0)
    for _ in range(8):
        run_step(scheduler)
    scheduler.enqueue(poor, 1)  # the youngest, which would lose its slot if ages decided
    run_step(scheduler)
    assert poor.slot is not None
    scheduler.enqueue(of_key("urgent", priority=0), 2)
    scheduler.admit(2)
    assert scheduler.num_preemptions == 1
    assert poor.slot is not None
    assert State.WAITING in [each.state for each in rich]


def test_key_with_the_most_service_loses_a_slot_when_cells_run_out() -> None:
    scheduler = new_scheduler(n_slots=3, unified=True, n_cells=60)
    rich = [of_key("rich", max_tokens=30) for _ in range(2)]
    for each in rich:
        scheduler.enqueue(each, 0)
    for _ in range(4):
        run_step(scheduler)
    poor = of_key("poor", max_tokens=30)
    scheduler.enqueue(poor, 1)
    while not scheduler.num_preemptions:
        run_step(scheduler)
    assert poor.slot is not None
    assert sum(each.state is State.WAITING for each in rich) == 1


def test_service_of_a_key_is_not_raised_when_its_sequence_is_preempted() -> None:
    scheduler = new_scheduler(n_slots=1)
    poor, urgent = of_key("poor", priority=9, max_tokens=30), of_key("urgent", priority=0)
    waiting = served(scheduler, poor, of_key("rich", priority=9, max_tokens=20), of_key("rich", priority=9))
    waiting.take(1)
    scheduler.release(poor)
    waiting.take(1)  # of "rich"
    again = of_key("poor", priority=9, max_tokens=30)
    scheduler.enqueue(again, 1)
    waiting.take(1)
    assert again.slot is not None
    scheduler.enqueue(urgent, 2)
    scheduler.admit(2)
    assert (urgent.state, again.state) == (State.PREFILLING, State.WAITING)
    assert scheduler.shares.of(9, "poor") < scheduler.shares.of(9, "rich")


def test_service_of_running_sequences_is_counted_when_another_key_arrives() -> None:
    """The queue was empty, so the new key starts with the service of the key that runs, and not below it."""
    scheduler = new_scheduler(n_slots=2)
    waiting = served(scheduler, of_key("first", max_tokens=30), of_key("first", max_tokens=30))
    for _ in range(20):
        waiting.step()
    scheduler.enqueue(of_key("second"), 1)
    assert scheduler.shares.of(3, "second")[0] == scheduler.shares.of(3, "first")[0] > 30


@pytest.mark.parametrize("seed", range(8))
def test_service_difference_between_backlogged_keys_stays_bounded(seed: int) -> None:
    """VTC's bound: what the sequences that run at the same time can cost, and one more."""
    source = random.Random(seed)
    num_slots, names = source.choice((1, 3)), [f"k{number}" for number in range(source.choice((2, 4)))]
    largest = {name: source.choice((3, 30)) for name in names}
    scheduler = new_scheduler(n_slots=num_slots, limits=Limits(budget=16, chunk_size=16))
    waiting = served(scheduler)
    for _ in range(600):
        for name in names:
            backlog = [s for s in scheduler.queue.waiting() if s.request.share.key == name]
            for _ in range(num_slots + 1 - len(backlog)):  # so that the key always waits
                scheduler.enqueue(of_key(name, max_tokens=source.randint(1, largest[name]), prefill_cost=0), 0)
        waiting.step()
        services = [waiting.service[name] for name in names]
        assert max(services) - min(services) <= 2 * (num_slots + 1) * 31


def test_service_of_idle_keys_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_IDLE_NODES", 20)
    scheduler = new_scheduler(n_slots=1)
    for number in range(200):
        waiting = of_key(f"org{number}/user")
        scheduler.enqueue(waiting, 0)
        scheduler.admit(0)
        scheduler.release(waiting)
    band = scheduler.shares._bands[3]
    assert not band.num_waiting
    assert all(len(part) < 130 for part in (band.service, band._last, band._children))


@pytest.mark.parametrize("weights", [(0.0,), (1.0, -1.0), (1.0, 1.0, 1.0)])
def test_fair_share_rejects_invalid_weights(weights: Seq[float]) -> None:
    with pytest.raises(InvalidRequest, match=r"share\.weights"):
        Share("a", tuple(weights))
