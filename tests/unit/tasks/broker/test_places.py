"""Which queues a worker takes jobs from: each model has places of its own."""

from __future__ import annotations

from cellama.tasks.broker.consumer import Places
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_name

A, B, DEFAULT = queue_name("a"), queue_name("b"), queue_name(DEFAULT_MODEL)


def with_capacity(capacity: dict[str, int]) -> list[str]:
    return [queue for queue, left in capacity.items() if left]


def places(look_ahead: int = 1, **jobs: int) -> Places:
    return Places(jobs or {"a": 4, "b": 2}, look_ahead, lambda: "a")


def test_places_of_a_full_model_leave_others_theirs() -> None:
    full = {A: [1] * 5}
    assert with_capacity(places().capacity([A, B], full)) == [B]
    assert with_capacity(places().capacity([A, B], {}, full)) == [B]
    assert with_capacity(places().capacity([A, B], {A: [1] * 4, B: [1] * 3})) == [A]


def test_places_of_urgent_jobs_are_not_taken_by_bulk_jobs_but_the_other_way_round() -> None:
    assert with_capacity(places().capacity([A], {A: [1] * 4})) == [A]
    assert with_capacity(places().capacity([A], {A: [1] * 4}, {A: [1]})) == []


def test_places_are_one_per_slot_and_the_look_ahead_for_jobs_of_all_kinds_and_again_for_urgent_ones() -> None:
    eight = places(look_ahead=4, a=8)
    assert eight.capacity([A], {}, {}) == eight.capacity([A], {}) == {A: 12}
    assert eight.capacity([A], {A: [1] * 5}, {A: [1] * 7}) == {A: 0}
    assert eight.capacity([A], {A: [1] * 5}) == {A: 7}  # they get the slots of the bulk jobs, which stay


def test_places_of_the_default_queue_are_those_of_its_model() -> None:
    assert with_capacity(places().capacity([A, DEFAULT, B], {}, {DEFAULT: [1] * 3, A: [1] * 2})) == [B]
    assert places().by_model([B, DEFAULT, A]) == [[B], [DEFAULT, A]]


def test_places_take_two_chunks_whatever_their_weight() -> None:
    assert with_capacity(places(look_ahead=2).capacity([A], {}, {A: [100]})) == [A]
    assert with_capacity(places(look_ahead=2).capacity([A], {}, {A: [100, 100]})) == []


def test_places_follow_models_that_come_and_go() -> None:
    jobs = {"a": 1}
    some = Places(jobs, 0, lambda: None)
    assert with_capacity(some.capacity([B], {B: [1]})) == []  # one, at least
    jobs["b"] = 2
    assert with_capacity(some.capacity([B], {B: [1]})) == [B]
    assert with_capacity(some.capacity([DEFAULT], {})) == [DEFAULT]  # nobody serves it yet
