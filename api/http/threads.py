"""Threads for what would hold up the event loop. Each kind of work has its own, so that disks, name servers and large
bodies never keep jobs from being queued: those use the event loop's default executor."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

FILES = ThreadPoolExecutor(16, thread_name_prefix="cellama-files")  # a slow disk or bucket keeps only files waiting
NAMES = ThreadPoolExecutor(8, thread_name_prefix="cellama-names")  # a name server may take seconds to answer
BODIES = ThreadPoolExecutor(1, thread_name_prefix="cellama-bodies")  # one: more of them would only share the GIL


async def in_thread(pool: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """As `asyncio.to_thread`, in a thread of this pool."""
    call = partial(contextvars.copy_context().run, function, *args, **options)
    return await asyncio.get_running_loop().run_in_executor(pool, call)
