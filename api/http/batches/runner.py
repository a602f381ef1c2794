"""What drives batches inside a gateway: it looks for those without a driver, and sweeps what has expired."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from functools import cached_property

from redis.asyncio import Redis

from cellama.api.http.background import FILES, LookLoop, in_thread
from cellama.api.http.files.records import Record
from cellama.api.http.files.service import FileService
from cellama.api.http.files.store import store_of
from cellama.api.http.files.upload import sweep_uploads
from cellama.config import Settings
from cellama.tasks.connection.connections import connect_async

from .driver import Driver
from .leases import GatewayLease, names_without_lease
from .run_files import clear, old_runs
from .service import OPEN, BatchService

log = logging.getLogger(__name__)

SWEEP_S = 60.0  # longer than any lease, else a gateway would meet its own
ANSWER_S = 5.0  # of Redis: shorter than the rest of a lease after a failed renewal
ORPHANED_S = 60.0  # an open batch without a record after a minute was never made, or has expired


class Runner:
    """Drives batches from `start` to `close`. One per app, for one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError if the place of files can't be used."""
        self._settings = settings
        self._store = store_of(settings)
        self._loop = LookLoop("batches", self._sweep_and_look)
        self._driven: dict[str, tuple[Driver, asyncio.Task[None]]] = {}
        self._next_sweep = 0.0

    @cached_property
    def _redis(self) -> Redis:
        return connect_async(self._settings.redis_url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S)

    @cached_property
    def files(self) -> FileService:
        return FileService(self._store, self._redis)

    @cached_property
    def batches(self) -> BatchService:
        return BatchService(self._settings, self._redis)

    def start(self) -> None:
        """Start to drive batches; within a running event loop. Further calls change nothing."""
        self._loop.start()

    async def close(self) -> None:
        """Leave the batches where they are, for other gateways, and close the connections."""
        await self._loop.close()
        for driver, _ in self._driven.values():
            driver.stop()
        await asyncio.gather(*(task for _, task in self._driven.values()), return_exceptions=True)
        if "_redis" in self.__dict__:
            await self._redis.aclose()

    async def _sweep_and_look(self) -> bool:
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            await self.sweep()
        await self.look()
        return False

    async def look(self) -> None:
        """Take a batch that has no driver, if this gateway has room for it.

        Batches of tenants with the fewest drivers here come first. A batch that is cancelled, or whose time is over, is
        taken without room, so its end waits for nothing. If all room is taken and a tenant has no driver here, while
        another one has several, one of those is left, until there is room again.
        """
        self._driven = {name: pair for name, pair in self._driven.items() if not pair[1].done()}
        num, most = len(self._driven), self._settings.gateway_batches_at_once
        if num >= 2 * most:
            return
        num_of = Counter(driver.tenant for driver, _ in self._driven.values())
        waiting = sorted(await self._waiting(), key=lambda record: num_of[record["tenant"]])
        now = await self.batches.records.now() if waiting else 0.0
        for record in waiting:
            is_over = record["status"] == "cancelling" or record["expires_at"] < now
            if (num < most or is_over) and await self._take(record):
                return  # which batch is next depends on this one
        [(tenant, num_driven)] = num_of.most_common(1) or [(None, 0)]
        if num >= most and num_driven > 1 and any(not num_of[record["tenant"]] for record in waiting):
            drivers = [driver for driver, _ in self._driven.values()]
            if not any(driver.is_stopping for driver in drivers):
                [*_, last] = [driver for driver in drivers if driver.tenant == tenant]
                log.info("batch %s is left for a while: its tenant has several, and another tenant has none", last.id)
                last.stop()

    async def _waiting(self) -> list[Record]:
        """Return the open batches that no gateway drives and this one can, the oldest first."""
        found = [entry for entry in await self.batches.open_batches() if entry[0] not in self._driven]
        if found and self.files.known_place is None:  # what was put there first may have come after the last sweep
            await self.files.look_at_place()
        free = await names_without_lease(self._redis, [batch_id for batch_id, _, _ in found])
        records = {record["id"]: record for record in await self.batches.records.read_all(sorted(free))}
        waiting = []
        for batch_id, tenant, made_at in found:
            if batch_id not in free:
                continue
            record = records.get(batch_id)
            if record is not None and record["place"] != self.files.known_place:
                continue  # its files are out of this gateway's reach
            if record is not None and record["status"] in OPEN:
                waiting.append(record)
            elif record is not None or await self.batches.records.now() > made_at + ORPHANED_S:
                await self._close(batch_id, tenant)
        return waiting

    async def _take(self, record: Record) -> bool:
        lease = GatewayLease(self._redis, record["id"], self._settings.gateway_lease_s)
        if not await lease.take():
            return False
        record = await self.batches.records.read(record["id"]) or record  # its last driver may just have left it
        driver = Driver(self._settings, self.files, self.batches, lease, record)
        self._driven[driver.id] = (driver, asyncio.create_task(driver.drive(), name=driver.id))
        return True

    async def _close(self, batch_id: str, tenant: str | None) -> None:
        """Clear up after a batch that has expired, or has ended while its driver died."""
        try:
            await in_thread(FILES, clear, self._store, batch_id)
        except OSError as error:
            log.warning("what batch %s has left can't be deleted now: %s", batch_id, error)
        else:
            await self.batches.close(batch_id, tenant)

    async def sweep(self) -> None:
        """Delete expired files, and what gateways that died have left on this machine."""
        place = await self.files.look_at_place()
        if place is None:
            return  # nothing was ever there
        duty = GatewayLease(self._redis, f"sweep:{place}", self._settings.gateway_lease_s)
        if await duty.take():  # never released: others need not sweep so soon
            await self.files.sweep()
        await in_thread(FILES, sweep_uploads, self._store.work_dir, time.time())
        for batch_id in await in_thread(FILES, old_runs, self._store, time.time()):
            record = await self.batches.records.read(batch_id)
            if record is None or record["status"] not in OPEN:
                await self._close(batch_id, None if record is None else record["tenant"])
