"""Run the gateway's background work, which consists of blocking calls in thread pools and polling loops.

Each kind of blocking work has its own thread pool. Job queueing uses the event loop's default executor, so it is never
delayed by slow disks, slow name servers or large bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from functools import partial
from typing import ParamSpec, TypeVar

from redis.exceptions import RedisError

from cellama.config.logging import event_logger
from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable

log = event_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

FILES = ThreadPoolExecutor(16, thread_name_prefix="cellama-files")  # a slow disk or bucket delays only files
NAMES = ThreadPoolExecutor(8, thread_name_prefix="cellama-names")  # a name server may take seconds to answer
BODIES = ThreadPoolExecutor(1, thread_name_prefix="cellama-bodies")  # one thread, because more would only share the GIL
POLL_S = 1.0  # pause between two polls: new work waits half a second on average, and an idle gateway costs little


async def in_thread(pool: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function in a thread of this pool, with the caller's context variables."""
    call = partial(contextvars.copy_context().run, function, *args, **options)
    return await asyncio.get_running_loop().run_in_executor(pool, call)


class PollLoop:
    """Calls a function every POLL_S seconds, from `start` to `close`, in one event loop.

    An outage is logged only once.
    """

    def __init__(self, name: str, poll: Callable[[], Awaitable[bool]]) -> None:
        """Create the loop without starting it.

        `poll` must return True if the loop should call `poll` again immediately.
        """
        self._name = name
        self._poll = poll
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._is_reachable = True

    def start(self) -> None:
        """Start polling. Further calls have no effect."""
        if self._task is None:
            # An empty context: a request that starts the loop must not become the parent span of all later work.
            self._task = asyncio.create_task(self._run(), name=self._name, context=Context())

    async def close(self) -> None:
        """Wait for the current poll to finish. A poll is not cancelled, because it may have just taken a lease."""
        self._closing.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._closing.is_set():
            is_busy = False
            try:
                is_busy = await self._poll()
                self._log_outage(None)
            except (RedisError, RedisUnreachable, RedisRefused, OSError) as error:
                self._log_outage(error)
            except Exception:
                log.exception("background loop failed", loop=self._name, detail="unexpected error; the loop continues")
            if not is_busy:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), POLL_S)

    def _log_outage(self, error: Exception | None) -> None:
        if (error is None) == self._is_reachable:
            return
        self._is_reachable = error is None
        if error is None:
            log.warning("background loop resumed", loop=self._name)
        else:
            log.warning(
                "background loop interrupted", loop=self._name, detail=f"{error}; the loop resumes automatically"
            )
