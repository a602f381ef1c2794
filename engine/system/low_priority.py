"""Work that must not slow down what serves: it runs when a core has nothing better to do, or little."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

NICENESS = 10  # a tenth of a core against threads that are busy; at 19 a load beside a busy engine took 40 x as long


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
