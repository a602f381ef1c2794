"""Work beside the requests: threads for what would block the event loop, and loops that look for work.

Each kind of work has threads of its own, so that disks, name servers and large bodies never delay the queueing of jobs,
which uses the event loop's default executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from typing import ParamSpec, TypeVar

from redis.exceptions import RedisError

from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

FILES = ThreadPoolExecutor(16, thread_name_prefix="cellama-files")  # a slow disk or bucket keeps only files waiting
NAMES = ThreadPoolExecutor(8, thread_name_prefix="cellama-names")  # a name server may take seconds to answer
BODIES = ThreadPoolExecutor(1, thread_name_prefix="cellama-bodies")  # one: more of them would only share the GIL
LOOK_S = 1.0  # pause between two looks: new work waits half a second on average, and an idle gateway costs little


async def in_thread(pool: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """As `asyncio.to_thread`, in a thread of this pool."""
    call = partial(contextvars.copy_context().run, function, *args, **options)
    return await asyncio.get_running_loop().run_in_executor(pool, call)


class LookLoop:
    """Call a function every LOOK_S, from `start` to `close`, in one event loop. An outage is logged once."""

    def __init__(self, name: str, look: Callable[[], Awaitable[bool]]) -> None:
        """`look` returns True if it should be called again at once."""
        self._name = name
        self._look = look
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._is_reachable = True

    def start(self) -> None:
        """Start looking. Further calls change nothing."""
        if self._task is None:
            # An empty context: a request that starts the loop must not become the parent span of all later work.
            self._task = asyncio.create_task(self._run(), name=self._name, context=Context())

    async def close(self) -> None:
        """Return when the last look has ended. It is not cancelled, because that could lose a lease it has taken."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._closing.is_set():
            is_busy = False
            try:
                is_busy = await self._look()
                self._log_outage(None)
            except (RedisError, RedisUnreachable, RedisRefused, OSError) as error:
                self._log_outage(error)
            except Exception:
                log.exception("%s: unforeseen error; trying again", self._name)
            if not is_busy:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), LOOK_S)

    def _log_outage(self, error: Exception | None) -> None:
        if (error is None) != self._is_reachable:
            self._is_reachable = error is None
            log.warning("%s %s", self._name, "continue" if error is None else f"wait: {error}")
