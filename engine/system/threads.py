"""Threads with deep stacks, threads of low priority, and threads whose result is waited for."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# Regular expressions of a vocabulary and parsers of grammars recurse with the length of a text; what overflows the
# stack ends the process. Memory that is not used costs nothing but addresses.
STACK_BYTES = 64 << 20
NICENESS = 10  # a tenth of a core against threads that are busy; at 19 a load beside a busy engine took 40 x as long

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


def at_low_priority(work: Callable[[], T]) -> T:
    """What `work` returns or raises; meanwhile it gives way to all other threads. On Linux, elsewhere it just runs.

    Threads that `work` starts give way, too, for good. An engine's must be started outside.
    """
    if sys.platform != "linux":
        return work()
    future: Future[T] = Future()

    def run() -> None:
        give_way()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="cellama-low-priority", daemon=True).start()
    return future.result()


def give_way() -> None:
    """This thread gives way to all others from now on. On Linux, elsewhere nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # of this thread alone
