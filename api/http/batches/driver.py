"""One batch, driven by this gateway as long as its lease holds: validated, run, and its files put out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from redis.exceptions import RedisError

from cellama.api.batch.start import Paths, paths_of
from cellama.api.http.callers import Caller
from cellama.api.http.errors import ApiError
from cellama.api.http.files.records import Record
from cellama.api.http.files.shelf import Shelf
from cellama.api.http.files.store import fetch, make_folder
from cellama.api.http.threads import FILES, in_thread
from cellama.config import Settings, get_settings
from cellama.tasks.contract.errors import InvalidJob, JobError, RedisRefused, RedisUnreachable

from .desk import Desk
from .input_check import Checked, Rules, check_input
from .leases import HeldLease, Leases
from .parts import Parts
from .results import Results, results_of
from .run_thread import Left, RunThread
from .scratch import clear, folder_of

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks at the record: whether it shall be cancelled
NOTE_S = 20.0  # that Redis may take to hear of a part
OUTPUT_PURPOSE = "batch_output"


class Driver:
    """Drives one batch, in one task. What goes wrong with the world is left to the next driver."""

    def __init__(
        self, settings: Settings, shelf: Shelf, desk: Desk, leases: Leases, held: HeldLease, record: Record
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._desk = desk
        self._leases = leases
        self._held = held
        self._record = record
        self.id: str = record["id"]
        self.tenant: str | None = record["tenant"]
        self._folder = folder_of(shelf.store, self.id)
        self._input = self._folder / "input.jsonl"
        self._paths: Paths = paths_of(self._folder / "output.jsonl")
        self._has_work = False  # on this machine, where other gateways do not see it
        self._thread = RunThread(settings, held, record, self._input, self._paths)
        # A run takes as long as its batch: in one of the loop's own threads it would be in the way of uploads.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=self.id)

    @property
    def is_stopping(self) -> bool:
        return self._thread.stop.is_set()

    def stop(self) -> None:
        """The batch is left where it is, soon; for another driver."""
        self._thread.stop.set()

    async def drive(self) -> None:
        """Returns when the batch has ended, or is left. Raises nothing but CancelledError."""
        async with self._watched():
            try:
                await self._steps()
            except Left as left:
                log.info("batch %s is left: %s", self.id, left)
                await self._leases.release(self._held)
            except (OSError, sqlite3.Error, RedisError, JobError, ApiError) as error:
                # The lease is not given back: the next try is when it ends.
                log.warning("batch %s can't go on now, and is tried again: %s", self.id, error)
            except Exception:
                log.exception("batch %s met an error that was not foreseen, and is tried again", self.id)
            finally:
                self._threads.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        over = asyncio.Event()  # and no cancel, which can be lost within a connection to Redis
        watch = asyncio.create_task(self._watch(over))
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, over: asyncio.Event) -> None:
        """Renews the lease, and hears of a cancel."""
        renewed_at = time.monotonic()
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), LOOK_S)
                return
            try:
                if time.monotonic() - renewed_at >= self._leases.renew_s:
                    await self._leases.renew(self._held)
                    renewed_at = time.monotonic()
                await self._hear()
            except (RedisError, RedisUnreachable, RedisRefused) as error:
                log.warning("the lease of batch %s was not renewed: %s", self.id, error)

    async def _hear(self) -> str:
        """The status of the batch. If its end is asked for, by its tenant or by `cellama batch cancel`, the run hears
        of it."""
        if not self._thread.cancelled.is_set() and await self._desk.take_wish(self.id):
            await self._desk.move(self._record, "cancelling", of=("validating", "in_progress"))
        record = await self._desk.records.read(self.id)
        status: str = "cancelling" if record is None else record["status"]
        if status == "cancelling":
            self._thread.cancelled.set()
        return status

    async def _steps(self) -> None:
        status = await self._hear()  # before the run forgets what was asked of an earlier one
        if status == "validating":
            status = await self._validate()
        elif status in ("in_progress", "cancelling") and self._record.get("total") is None:
            status = await self._end("cancelled", of=("cancelling",))  # nothing of it has begun
        if status in ("in_progress", "cancelling"):
            status = await self._run()
        if status == "finalizing":
            await self._put_out()

    # Validation

    async def _validate(self) -> str:
        try:
            checked = await self._in_thread(self._check)
        except Left:
            if not self._thread.cancelled.is_set():
                raise
            return await self._end("cancelled", of=("validating", "cancelling"))
        if checked.errors:
            status = await self._end("failed", of=("validating",), errors=checked.errors, total=0)
        else:
            found = {"total": checked.num_lines, "model": checked.model}
            status = await self._move("in_progress", of=("validating",), **found)
        return status if status != "cancelling" else await self._end("cancelled", of=("cancelling",))

    def _check(self) -> Checked:
        try:
            self._fetch_input()
        except FileNotFoundError:
            message = f"the contents of {self._record['input_file_id']!r} are gone"
            return Checked(errors=[{"code": "file_not_found", "message": message, "param": None, "line": None}])
        models, adapters = (self._record.get(name) for name in ("models", "adapters"))
        caller = Caller(
            self.tenant,
            models=None if models is None else frozenset(models),
            adapters=None if adapters is None else frozenset(adapters),
        )
        rules = Rules(
            self._record["endpoint"],
            self._settings.gateway_max_batch_lines,
            get_settings().max_payload_bytes,  # which holds for all jobs that this process makes
            caller,
        )
        with self._input.open("rb") as stream:
            return check_input(stream, rules, self._thread.check)

    def _fetch_input(self) -> None:
        make_folder(self._folder)
        if not self._input.exists():
            fetch(self._shelf.store, self._record["input_file_id"], self._input)

    # The run

    async def _run(self) -> str:
        ends_as = await self._run_to_end()
        if ends_as is None:
            return "failed"
        return await self._move("finalizing", of=("in_progress", "cancelling"), ends_as=ends_as)

    async def _run_to_end(self) -> str | None:
        """The state in which the run ends; None if the batch has failed by it."""
        parts = self._parts()
        try:
            state: str = await self._in_thread(lambda: self._run_in_thread(parts))
            return state
        except (InvalidJob, FileNotFoundError) as error:
            log.warning("batch %s fails: %s", self.id, error)
            code, told = "file_not_found", "the contents of its input file are gone"
            if isinstance(error, InvalidJob):  # which names paths of this machine
                code, told = "internal_error", "its run can't go on at the gateway, whose log says why"
            errors = [{"code": code, "message": told, "param": None, "line": None}]
            await self._end("failed", of=("in_progress", "cancelling", "finalizing"), errors=errors)
            return None

    def _parts(self) -> Parts:
        return Parts(self._shelf.store, self.id, self._record.get("parts", ()), self._record.get("parts_bytes", 0))

    def _run_in_thread(self, parts: Parts) -> str:
        self._fetch_input()
        if self._shelf.store.shares_work:
            return self._thread.run()
        if not self._has_work:  # what lies here is of an earlier driver; another machine may have gone on since
            for path in self._folder.glob("output*"):  # the work file has files beside it
                path.unlink()
            parts.fetch(self._paths.output)
            self._has_work = True
        loop = self._thread.loop

        def save() -> None:
            """In the run's thread, between two of its turns."""
            if (new := parts.save(self._paths.output)) is not None:
                noted = asyncio.run_coroutine_threadsafe(self._note_parts(*new), loop).result(NOTE_S)
                if not noted:
                    raise Left("another gateway drives it")
                parts.saved(*new)

        return self._thread.run(save)

    async def _note_parts(self, names: list[str], size: int) -> bool:
        record, lease = self._record, self._held.lease
        life_s = max(1, int(record["gone_at"] - await self._desk.records.now()))
        done, _ = await self._desk.records.advance(
            self.id, {"parts": names, "parts_bytes": size}, of=("in_progress", "cancelling", "finalizing"),
            life_s=life_s, lease=lease,
        )  # fmt: skip
        record["parts"], record["parts_bytes"] = names, size
        return done

    # The end

    async def _put_out(self) -> None:
        record = await self._desk.records.read(self.id) or self._record
        if record["ends_as"] == "cancelled":
            self._thread.cancelled.set()
        has_work = self._paths.work.exists() if self._shelf.store.shares_work else self._has_work
        if not has_work and await self._run_to_end() is None:  # it was on another machine
            return
        results = await self._in_thread(lambda: results_of(self._paths, record["total"], record["ends_as"]))
        ids = await self._add_files(results)
        await self._end(
            record["ends_as"], of=("finalizing",), counts=results.counts, usage=results.usage, errors=[], **ids
        )

    async def _add_files(self, results: Results) -> dict[str, str | None]:
        """Under ids that come of the batch's own, so that it may be done again."""
        ids: dict[str, str | None] = {}
        for name, path in (("output", results.output), ("error", results.errors)):
            ids[f"{name}_file_id"] = None
            if path is not None:
                self._thread.check_lease()
                file_id = f"file-{self.id.removeprefix('batch_')}-{name}"
                life_s, shown = self._record["output_life_s"], f"{self.id}_{name}.jsonl"
                await self._shelf.add(path, shown, OUTPUT_PURPOSE, Caller(self.tenant), life_s, file_id=file_id)
                ids[f"{name}_file_id"] = file_id
        return ids

    async def _end(self, status: str, *, of: tuple[str, ...], **fields: Any) -> str:
        """The batch has ended; nothing of its run is left, and no driver looks at it any more."""
        reached = await self._move(status, of=of, **fields)
        if reached == status:
            await in_thread(FILES, clear, self._shelf.store, self.id)
            await self._desk.close(self.id, self.tenant)  # last: what was not cleared is found by the next driver
            await self._leases.release(self._held)
            log.info("batch %s has ended: %s", self.id, status)
        return reached

    async def _move(self, status: str, *, of: tuple[str, ...], **fields: Any) -> str:
        """The status that the batch has then: this one, or "cancelling" if that came in between. Raises Left."""
        done, now = await self._desk.move(self._record, status, of=of, lease=self._held.lease, **fields)
        if not done and now != "cancelling":
            raise Left(f"another gateway drives it; it is {now or 'gone'}")
        self._record |= {**(fields if done else {}), "status": now}
        return now

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Work that blocks. If this task is cancelled, the thread stops at its next look, and is waited for."""
        self._thread.loop = asyncio.get_running_loop()
        task = self._thread.loop.run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.gather(task, return_exceptions=True)
            raise
