"""A worker limits the free memory that the C library keeps."""

from __future__ import annotations

import platform

import pytest

from cellama.tasks.worker.runtime import MAPPED_BYTES, MAX_FREE_BYTES, NUM_HEAPS, limit_free_heap, trim_heap


class Glibc:
    """Records the options of mallopt, and refuses those in `unknown`."""

    def __init__(self, *unknown: int) -> None:
        self.unknown = unknown
        self.options: dict[int, int] = {}
        self.num_trims = 0

    def gnu_get_libc_version(self) -> str:
        return "2.36"

    def mallopt(self, option: int, value: int) -> int:
        self.options[option] = value
        return int(option not in self.unknown)

    def malloc_trim(self, kept: int) -> int:
        self.num_trims += 1
        return 1


def test_limit_free_heap_sets_the_options_of_mallopt() -> None:
    libc = Glibc()
    assert limit_free_heap(libc)
    assert sorted(libc.options.values()) == sorted((MAX_FREE_BYTES, MAPPED_BYTES, NUM_HEAPS))


def test_limit_free_heap_sets_the_other_options_when_one_option_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    libc = Glibc(-1)
    assert not limit_free_heap(libc)
    assert len(libc.options) == 3
    assert "[-1]" in caplog.text


def test_trim_heap_calls_malloc_trim() -> None:
    libc = Glibc()
    trim_heap(libc)
    assert libc.num_trims == 1


def test_heap_functions_do_nothing_without_glibc() -> None:
    assert not limit_free_heap(object())
    trim_heap(object())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the options are glibc's")
def test_glibc_accepts_the_options() -> None:
    assert limit_free_heap()
    trim_heap()
