"""The capacity of a worker for jobs of each model."""

from __future__ import annotations

from cellama.tasks.broker.consumer import JobLimits
from cellama.tasks.contract.names import DEFAULT_MODEL, queue_name

A, B, DEFAULT = queue_name("a"), queue_name("b"), queue_name(DEFAULT_MODEL)


def with_capacity(capacity: dict[str, int]) -> list[str]:
    return [queue for queue, remaining in capacity.items() if remaining]


def limits(look_ahead: int = 1, **jobs: int) -> JobLimits:
    return JobLimits(jobs or {"a": 4, "b": 2}, look_ahead, lambda: "a")


def test_fully_loaded_model_does_not_reduce_the_capacity_of_other_models() -> None:
    full = {A: [1] * 5}
    assert with_capacity(limits().capacity([A, B], full)) == [B]
    assert with_capacity(limits().capacity([A, B], {}, full)) == [B]
    assert with_capacity(limits().capacity([A, B], {A: [1] * 4, B: [1] * 3})) == [A]


def test_urgent_jobs_may_use_the_capacity_of_bulk_jobs_but_not_vice_versa() -> None:
    assert with_capacity(limits().capacity([A], {A: [1] * 4})) == [A]
    assert with_capacity(limits().capacity([A], {A: [1] * 4}, {A: [1]})) == []


def test_limit_is_slots_plus_look_ahead_for_urgent_and_bulk_jobs() -> None:
    eight = limits(look_ahead=4, a=8)
    assert eight.capacity([A], {}, {}) == eight.capacity([A], {}) == {A: 12}
    assert eight.capacity([A], {A: [1] * 5}, {A: [1] * 7}) == {A: 0}
    assert eight.capacity([A], {A: [1] * 5}) == {A: 7}  # they preempt the bulk jobs, which stay held


def test_default_queue_shares_the_capacity_of_the_default_model() -> None:
    assert with_capacity(limits().capacity([A, DEFAULT, B], {}, {DEFAULT: [1] * 3, A: [1] * 2})) == [B]
    assert limits().by_model([B, DEFAULT, A]) == [[B], [DEFAULT, A]]


def test_worker_can_hold_two_chunks_of_any_weight_per_model() -> None:
    assert with_capacity(limits(look_ahead=2).capacity([A], {}, {A: [100]})) == [A]
    assert with_capacity(limits(look_ahead=2).capacity([A], {}, {A: [100, 100]})) == []


def test_capacity_changes_when_models_are_loaded_and_unloaded() -> None:
    jobs = {"a": 1}
    some = JobLimits(jobs, 0, lambda: None)
    assert with_capacity(some.capacity([B], {B: [1]})) == []  # the limit is at least 1
    jobs["b"] = 2
    assert with_capacity(some.capacity([B], {B: [1]})) == [B]
    assert with_capacity(some.capacity([DEFAULT], {})) == [DEFAULT]  # no model serves it yet


def test_guaranteed_bulk_jobs_do_not_depend_on_urgent_jobs() -> None:
    some = JobLimits({"a": 8, "b": 8}, 4, lambda: "a", {"a": 2, "b": 0}.__getitem__)
    assert some.guaranteed([A, B, DEFAULT], {}) == {A: 2, B: 0, DEFAULT: 2}
    assert some.guaranteed([A, B, DEFAULT], {A: [1], DEFAULT: [1]}) == {A: 0, B: 0, DEFAULT: 0}
    assert some.guaranteed([A], {A: [100]}) == {A: 1}  # a slice of a bulk run, whose lines fill the slot
