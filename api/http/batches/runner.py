"""The gateway's loop that finds batches without a driver, drives them, and deletes expired files."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import cached_property

from redis.asyncio import Redis

from cellama.api.http.background import FILES, PollLoop, in_thread
from cellama.api.http.files.records import Record
from cellama.api.http.files.service import FileService
from cellama.api.http.files.store import store_of
from cellama.api.http.files.upload import sweep_uploads
from cellama.config import Settings
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import connect_async

from .driver import BatchDriver
from .leases import GatewayLease, names_without_lease
from .run_files import abandoned_runs, delete_run
from .service import OPEN, BatchService

log = event_logger(__name__)

SWEEP_S = 60.0  # longer than any lease, so that a gateway never encounters its own lease from the previous sweep
ANSWER_S = 5.0  # timeout for a reply of Redis, shorter than the rest of a lease after a failed renewal
ORPHANED_S = 60.0  # an open batch that has no record after a minute was never created, or has expired


class BatchRunner:
    """Drives batches from `start` to `close`. Each app has its own runner, which belongs to one event loop."""

    def __init__(self, settings: Settings) -> None:
        """Create a runner. Raises SettingsError if the file storage can't be used."""
        self._settings = settings
        self._store = store_of(settings)
        self._loop = PollLoop("batches", self._sweep_and_poll)
        self._driven: dict[str, tuple[BatchDriver, asyncio.Task[None]]] = {}
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
        """Start driving batches in the running event loop. Further calls have no effect."""
        self._loop.start()

    async def close(self) -> None:
        """Stop all drivers so that other gateways can take over their batches, and close the connections."""
        await self._loop.close()
        for driver, _ in self._driven.values():
            driver.stop()
        await asyncio.gather(*(task for _, task in self._driven.values()), return_exceptions=True)
        if "_redis" in self.__dict__:
            await self._redis.aclose()

    async def _sweep_and_poll(self) -> bool:
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            await self.sweep()
        await self.poll()
        return False

    async def poll(self) -> None:
        """Start driving one batch that has no driver, if this gateway may drive more batches.

        Tenants with the fewest drivers in this gateway come first. Cancelled and expired batches are driven even if the
        limit is reached, so that they end without delay. If the limit is reached, and a tenant has no driver while
        another tenant has several, one of the other tenant's drivers stops.
        """
        self._driven = {name: pair for name, pair in self._driven.items() if not pair[1].done()}
        num, max_num = len(self._driven), self._settings.gateway_batches_at_once
        if num >= 2 * max_num:
            return
        num_of = Counter(driver.tenant for driver, _ in self._driven.values())
        waiting = sorted(await self._waiting(), key=lambda record: num_of[record["tenant"]])
        now = await self.batches.records.now() if waiting else 0.0
        for record in waiting:
            is_over = record["status"] == "cancelling" or record["expires_at"] < now
            if (num < max_num or is_over) and await self._take(record):
                return  # one at a time, because it changes which batch is next
        [(tenant, num_driven)] = num_of.most_common(1) or [(None, 0)]
        if num >= max_num and num_driven > 1 and any(not num_of[record["tenant"]] for record in waiting):
            drivers = [driver for driver, _ in self._driven.values()]
            if not any(driver.is_stopping for driver in drivers):
                [*_, last] = [driver for driver in drivers if driver.tenant == tenant]
                log.info(
                    "batch paused",
                    batch=last.id,
                    detail="the tenant has several running batches, while another tenant has none",
                )
                last.stop()

    async def _waiting(self) -> list[Record]:
        """Return the open batches that have no driver and whose files this gateway can read, oldest first."""
        found = [entry for entry in await self.batches.open_batches() if entry[0] not in self._driven]
        if found and self.files.known_store_id is None:  # the first file may have been stored after the last sweep
            await self.files.read_store_id()
        free = await names_without_lease(self._redis, [batch_id for batch_id, _, _ in found])
        records = {record["id"]: record for record in await self.batches.records.read_all(sorted(free))}
        waiting = []
        for batch_id, tenant, made_at in found:
            if batch_id not in free:
                continue
            record = records.get(batch_id)
            if record is not None and record["place"] != self.files.known_store_id:
                continue  # its files are in another store
            if record is not None and record["status"] in OPEN:
                waiting.append(record)
            elif record is not None or await self.batches.records.now() > made_at + ORPHANED_S:
                await self._close(batch_id, tenant)
        return waiting

    async def _take(self, record: Record) -> bool:
        lease = GatewayLease(self._redis, record["id"], self._settings.gateway_lease_s)
        if not await lease.take():
            return False
        record = await self.batches.records.read(record["id"]) or record  # its last driver may have changed it
        driver = BatchDriver(self._settings, self.files, self.batches, lease, record)
        self._driven[driver.id] = (driver, asyncio.create_task(driver.drive(), name=driver.id))
        return True

    async def _close(self, batch_id: str, tenant: str | None) -> None:
        """Delete the files of a batch that has expired or whose driver died while ending the batch."""
        try:
            await in_thread(FILES, delete_run, self._store, batch_id)
        except OSError as error:
            log.warning("batch files not deleted", batch=batch_id, detail=f"{error}; the deletion will be retried")
        else:
            await self.batches.close(batch_id, tenant)

    async def sweep(self) -> None:
        """Delete expired files, and files that dead gateways have left on this machine."""
        store_id = await self.files.read_store_id()
        if store_id is None:
            return  # the store is empty
        duty = GatewayLease(self._redis, f"sweep:{store_id}", self._settings.gateway_lease_s)
        if await duty.take():  # never released, so that other gateways don't sweep again soon
            await self.files.sweep()
        await in_thread(FILES, sweep_uploads, self._store.work_dir, time.time())
        for batch_id in await in_thread(FILES, abandoned_runs, self._store, time.time()):
            record = await self.batches.records.read(batch_id)
            if record is None or record["status"] not in OPEN:
                await self._close(batch_id, None if record is None else record["tenant"])
