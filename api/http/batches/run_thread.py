"""The part of a driver that runs in a thread: `run_batch`, and what it is asked at each of its turns."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from cellama.api.batch.options import BatchOptions
from cellama.api.batch.start import Paths, run_batch
from cellama.api.batch.work import WorkFile
from cellama.api.http.files.records import Record
from cellama.config import Settings
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_clock import redis_time
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.keys import batch_key
from cellama.tasks.jobs import app_at

from .leases import HeldLease
from .parts import Schedule

CONNECT_TIMEOUT_S = 3.0


class Left(Exception):
    """This driver goes no further: it stops, or has no lease. The batch is as it was left."""


class RunThread:
    """`stop` and `cancelled` are set from outside; the other methods are called in the thread."""

    loop: asyncio.AbstractEventLoop  # that of the driver

    def __init__(self, settings: Settings, held: HeldLease, record: Record, input: Path, paths: Paths) -> None:
        self.stop = threading.Event()
        self.cancelled = threading.Event()
        self._settings = settings
        self._held = held
        self._record = record
        self._input = input
        self._paths = paths

    def check(self) -> None:
        """Raises Left, also if the batch is cancelled: before it runs, that is all there is to do."""
        self.check_lease()
        if self.cancelled.is_set():
            raise Left("it is cancelled")

    def check_lease(self) -> None:
        """Raises Left."""
        if self.stop.is_set():
            raise Left("this gateway stops")
        if not self._held.is_held:
            raise Left("its lease was lost")

    def run(self, save: Callable[[], None] = lambda: None) -> str:
        """The state in which the run ends. `save` is called now and then, at the end, and before the run is left.

        Raises Left, InvalidJob, OSError, RedisUnreachable, RedisRefused.
        """
        self._own_work_file()
        url = self._settings.redis_url
        with contextlib.closing(connect(url, socket_connect_timeout=CONNECT_TIMEOUT_S)) as redis:
            with reaching_redis(url):
                left_s = self._record["expires_at"] - redis_time(redis)
            turns = _Turns(self, redis, save)
            try:
                summary = run_batch(redis, app_at(url), self._options(left_s), turns.read, turns.turn)
            except Left:
                if self._held.is_held:
                    save()
                raise
            save()
            return summary.state

    def _own_work_file(self) -> None:
        """The bulk run has the batch's id, so that what Redis tells of it has the same name. An output without a work
        file is what a driver on another machine has saved: its lines have ended."""
        try:
            with contextlib.closing(WorkFile(self._paths.work)) as work:
                if not work.get("run_id"):
                    work.note(run_id=self._record["id"], **self._record.get("trace", {}))
        except sqlite3.OperationalError as error:
            if "locked" in str(error):  # by a process that has lost its lease, and does not know it yet
                raise Left("another process still has its work file") from None
            raise

    def _options(self, left_s: float) -> BatchOptions:
        tenant = self._record["tenant"]
        return BatchOptions(
            self._input,
            self._paths.output,
            format="jsonl",
            form="openai",
            params={"cache_scope": tenant} if tenant else {},
            deadline_s=max(0.0, left_s),
        )

    def tell_cancel(self, redis: Redis) -> None:
        """The run hears of it at its next look."""
        with contextlib.suppress(RedisError):
            redis.hset(batch_key(self._record["id"]), "cancel", "1")


class _Turns:
    """What is done at each turn of a run."""

    def __init__(self, thread: RunThread, redis: Redis, save: Callable[[], None]) -> None:
        self._thread = thread
        self._redis = redis
        self._save = save
        self._schedule = Schedule()

    def read(self, _: object) -> None:
        """While the input is read."""
        self._thread.check_lease()

    def turn(self, _: object) -> None:
        self._thread.check_lease()
        if self._thread.cancelled.is_set():
            self._thread.tell_cancel(self._redis)
        if self._schedule.is_due():
            self._save()
