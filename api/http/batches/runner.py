"""What drives batches inside a gateway: it looks for those without a driver, and sweeps what has expired."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from contextvars import Context
from functools import cached_property

from redis.asyncio import Redis
from redis.exceptions import RedisError

from cellama.api.http.files.records import Record
from cellama.api.http.files.service import FileService
from cellama.api.http.files.store import store_of
from cellama.api.http.files.upload import sweep_uploads
from cellama.api.http.threads import FILES, in_thread
from cellama.config import Settings
from cellama.tasks.connection.connections import connect_async
from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable

from .driver import Driver
from .leases import Leases
from .run_files import clear, old_runs
from .service import OPEN, BatchService, OpenBatch

log = logging.getLogger(__name__)

LOOK_S = 1.0
SWEEP_S = 60.0  # more than any lease lasts, else a gateway would meet its own
OUTAGE_RETRY_S = 3.0
ANSWER_S = 5.0  # of Redis
ORPHANED_S = 60.0  # after which an open batch without a record is one that was never made, or has expired


class Runner:
    """One per app, for one event loop. It works from `start` to `close`."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for a place of files that can't be used."""
        self._settings = settings
        self._store = store_of(settings)
        self._loop: asyncio.Task[None] | None = None
        self._driven: dict[str, tuple[Driver, asyncio.Task[None]]] = {}
        self._next_sweep = 0.0
        self._is_reachable = True
        self._stopping = asyncio.Event()

    @cached_property
    def _redis(self) -> Redis:
        return connect_async(self._settings.redis_url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S)

    @cached_property
    def files(self) -> FileService:
        return FileService(self._store, self._redis)

    @cached_property
    def batches(self) -> BatchService:
        return BatchService(self._settings, self._redis)

    @cached_property
    def _leases(self) -> Leases:
        return Leases(self._redis, self._settings.gateway_lease_s)

    def start(self) -> None:
        """It works; within a running event loop. The same call may come again."""
        if self._loop is None:
            # In a context of its own: what begins it may be a request, whose span is not above what is done for others.
            self._loop = asyncio.create_task(self._work(), name="batches", context=Context())

    async def close(self) -> None:
        """Batches are left where they are, for other gateways; connections are given back."""
        self._stopping.set()  # a cancel could come in between a lease and its driver, or be lost within a connection
        if self._loop is not None:
            await self._loop
        for driver, _ in self._driven.values():
            driver.stop()
        await asyncio.gather(*(task for _, task in self._driven.values()), return_exceptions=True)
        if "_redis" in self.__dict__:
            await self._redis.aclose()

    async def _work(self) -> None:
        while not self._stopping.is_set():
            pause_s = OUTAGE_RETRY_S
            try:
                await self._sweep_now_and_then()
                await self.look()
                pause_s = LOOK_S
                self._say_reachable(None)
            except (RedisError, RedisUnreachable, RedisRefused, OSError) as error:
                self._say_reachable(error)
            except Exception:
                log.exception("the look for batches met an error that was not foreseen")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    def _say_reachable(self, error: Exception | None) -> None:
        """Once for each outage, of Redis or of the place of files."""
        if (error is None) != self._is_reachable:
            self._is_reachable = error is None
            log.warning("batches %s", "go on" if error is None else f"wait: {error}")

    async def look(self) -> None:
        """Takes a batch that has no driver, if there is room for it. One that is cancelled, or whose time is over, has
        room beside the others: its end waits for nothing. A tenant without a driver here gets the place of one whose
        are several: that batch is left where it is, until there is room again."""
        self._driven = {name: pair for name, pair in self._driven.items() if not pair[1].done()}
        num, most = len(self._driven), self._settings.gateway_batches_at_once
        if num >= 2 * most:
            return
        mine = Counter(driver.tenant for driver, _ in self._driven.values())
        waiting = sorted(await self._waiting(), key=lambda entry: (mine[entry[1]], entry[2]))
        over = set() if num < most else await self.batches.over([entry[0] for entry in waiting])
        for entry in waiting:
            if (num < most or entry[0] in over) and await self._take(*entry):
                return  # whose turn it is now depends on this one
        if num >= most and max(mine.values()) > 1:
            for batch_id, tenant, _ in waiting:
                if mine[tenant] or await self._make_room(batch_id, mine.most_common(1)[0][0]):
                    return

    async def _waiting(self) -> list[OpenBatch]:
        """Those that no one drives."""
        waiting = [entry for entry in await self.batches.open_batches() if entry[0] not in self._driven]
        if waiting and self.files.known_place is None:  # what was put there first may have come after the last sweep
            await self.files.look_at_place()
        free = await self._leases.free([entry[0] for entry in waiting])
        return [entry for entry in waiting if entry[0] in free]

    async def _make_room(self, batch_id: str, tenant: str | None) -> bool:
        """The last batch of this tenant is left, if that gives a place to one that can be driven here."""
        record = await self.batches.records.read(batch_id)
        if record is None or not self._is_ours(record):
            return False
        drivers = [driver for driver, _ in self._driven.values()]
        if not any(driver.is_stopping for driver in drivers):
            [*_, last] = [driver for driver in drivers if driver.tenant == tenant]
            log.info("batch %s is left for a while: its tenant has several, and another one has none", last.id)
            last.stop()
        return True

    def _is_ours(self, record: Record) -> bool:
        """Whether it is to be driven, and its files are within this gateway's reach."""
        return bool(record["place"] == self.files.known_place and record["status"] in OPEN)

    async def _take(self, batch_id: str, tenant: str | None, made_at: float) -> bool:
        record = await self.batches.records.read(batch_id)
        if record is not None and record["place"] != self.files.known_place:
            return False  # its files are out of this gateway's reach
        if record is None or record["status"] not in OPEN:
            if record is not None or await self.batches.records.now() > made_at + ORPHANED_S:
                await self._close(batch_id, tenant)
            return False
        held = await self._leases.take(batch_id)
        if held is None:
            return False
        record = await self.batches.records.read(batch_id) or record  # another one may just have let go of it
        driver = Driver(self._settings, self.files, self.batches, self._leases, held, record)
        self._driven[batch_id] = (driver, asyncio.create_task(driver.drive(), name=batch_id))
        return True

    async def _close(self, batch_id: str, tenant: str | None) -> None:
        """A batch that has ended, whose driver died before it was done with it; or one that has expired."""
        try:
            await in_thread(FILES, clear, self._store, batch_id)
        except OSError as error:
            log.warning("what batch %s has left can't be deleted now: %s", batch_id, error)
        else:
            await self.batches.close(batch_id, tenant)

    async def _sweep_now_and_then(self) -> None:
        if time.monotonic() < self._next_sweep:
            return
        self._next_sweep = time.monotonic() + SWEEP_S
        await self.sweep()

    async def sweep(self) -> None:
        """Files that have expired are gone, and on this machine what gateways that died have left."""
        place = await self.files.look_at_place()
        if place is None:
            return  # nothing was ever there
        if await self._leases.take(f"sweep:{place}") is not None:  # never given back: others need not sweep so soon
            await self.files.sweep()
        await in_thread(FILES, sweep_uploads, self._store.work_dir, time.time())
        for batch_id in await in_thread(FILES, old_runs, self._store, time.time()):
            record = await self.batches.records.read(batch_id)
            if record is None or record["status"] not in OPEN:
                await self._close(batch_id, None if record is None else record["tenant"])
