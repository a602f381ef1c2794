"""Threads that share the rows of a matrix."""

from __future__ import annotations

import threading

import pytest

from cellama.engine.sampling.rows import RowThreads


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((7, 10), [(0, 3), (3, 7)]),
        ((64, 10), [(0, 21), (21, 42), (42, 64)]),  # there are only three threads
        ((5, 10), [(0, 5)]),  # too small for two threads
        ((2, 50), [(0, 1), (1, 2)]),
    ],
)
def test_rows_are_divided_among_the_threads(shape: tuple[int, int], parts: list[tuple[int, int]]) -> None:
    seen: list[tuple[int, int]] = []
    threads = RowThreads(3, min_values=30)
    threads.run(lambda first, end: seen.append((first, end)), shape)
    threads.close()
    assert sorted(seen) == parts


def test_the_parts_are_read_at_the_same_time() -> None:
    threads, barrier = RowThreads(2, min_values=1), threading.Barrier(2, timeout=30)
    threads.run(lambda first, end: barrier.wait() and None, (4, 4))
    threads.close()
    assert not barrier.broken


@pytest.mark.parametrize("failing", [0, 2])
def test_an_exception_is_raised_after_all_parts_have_ended(failing: int) -> None:
    threads, other_may_end, ended = RowThreads(2, min_values=1), threading.Event(), threading.Event()

    def read(first: int, end: int) -> None:
        if first == failing:
            threading.Timer(0.05, other_may_end.set).start()
            raise ValueError(f"row {first}")
        other_may_end.wait(30)
        ended.set()

    with pytest.raises(ValueError, match=f"row {failing}"):
        threads.run(read, (4, 4))
    threads.close()
    assert ended.is_set()


def test_fewer_threads_are_used_while_the_machine_is_busy() -> None:
    threads, seen = RowThreads(2, min_values=1), set[int]()
    threads.max_threads = 1
    threads.run(lambda first, end: seen.add(threading.get_ident()), (4, 4))
    threads.close()
    assert seen == {threading.get_ident()}
