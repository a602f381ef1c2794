"""Threads with room for llama.cpp's recursive code, and those whose result is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# Regular expressions of a vocabulary and parsers of grammars recurse with the length of a text; what overflows the
# stack ends the process. Memory that is not used costs nothing but addresses.
STACK_BYTES = 64 << 20

T = TypeVar("T")
_changing = threading.Lock()


def start_deep(run: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread with a stack of STACK_BYTES, started; other threads of the process get what they got before."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _changing:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def in_background(action: Callable[[], T], name: str) -> Future[T]:
    """Does it in a daemon thread of its own; the future gives what it returns, or raises what it does."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = action()
        except BaseException as error:  # the boundary of the thread
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
