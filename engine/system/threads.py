"""Start threads with large stacks, run functions at low priority, and return results from threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# A vocabulary's regular expressions and grammar parsers recurse with the length of a text, and a stack overflow ends
# the process. Unused memory costs only address space.
STACK_BYTES = 64 << 20
NICENESS = 10  # a tenth of a core next to busy threads; at 19, a load alongside a busy engine took 40 times as long

T = TypeVar("T")
_changing = threading.Lock()


def start_deep(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread with a stack of STACK_BYTES.

    The stack size of other threads doesn't change.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    with _changing:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def in_background(action: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a daemon thread, and return a future for the function's result or exception."""
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
    """Call a function at low priority, and return its result or raise its exception.

    The priority is lowered only on Linux. Threads started by the function keep the low priority, so don't start an
    engine's thread in the function.
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
    """Permanently lower the priority of the calling thread. This function has no effect on systems other than Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # affects this thread only
