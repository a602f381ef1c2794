"""What the worker asks of the C library's heap."""

from __future__ import annotations

import platform

import pytest

from cellama.tasks.worker.runtime import MAPPED_BYTES, MAX_FREE_BYTES, NUM_HEAPS, limit_free_heap, trim_heap


class Glibc:
    """Notes what it is asked; refuses the options in `unknown`."""

    def __init__(self, *unknown: int) -> None:
        self.unknown = unknown
        self.asked: dict[int, int] = {}
        self.num_trims = 0

    def gnu_get_libc_version(self) -> str:
        return "2.36"

    def mallopt(self, option: int, value: int) -> int:
        self.asked[option] = value
        return int(option not in self.unknown)

    def malloc_trim(self, kept: int) -> int:
        self.num_trims += 1
        return 1


def test_heap_is_told_how_much_it_may_keep() -> None:
    libc = Glibc()
    assert limit_free_heap(libc)
    assert sorted(libc.asked.values()) == sorted((MAX_FREE_BYTES, MAPPED_BYTES, NUM_HEAPS))


def test_heap_that_refuses_an_option_is_told_the_others(caplog: pytest.LogCaptureFixture) -> None:
    libc = Glibc(-1)
    assert not limit_free_heap(libc)
    assert len(libc.asked) == 3
    assert "[-1]" in caplog.text


def test_heap_is_trimmed() -> None:
    libc = Glibc()
    trim_heap(libc)
    assert libc.num_trims == 1


def test_heap_of_another_c_library_is_left_alone() -> None:
    assert not limit_free_heap(object())
    trim_heap(object())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")
def test_glibc_takes_the_options() -> None:
    assert limit_free_heap()
    trim_heap()
