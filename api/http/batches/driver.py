"""One batch, driven by this gateway while its lease holds: validated, run, and its results stored as files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from cellama.api.batch.options import BatchOptions
from cellama.api.batch.progress import Progress
from cellama.api.batch.run import progress_of
from cellama.api.batch.start import paths_of, run_batch
from cellama.api.batch.work import WorkFile
from cellama.api.http.callers import Caller
from cellama.api.http.errors import ApiError
from cellama.api.http.files.records import Record
from cellama.api.http.files.service import FileService
from cellama.api.http.files.store import fetch, make_folder, open_new
from cellama.api.http.threads import FILES, in_thread
from cellama.api.openai.answers import failure_of
from cellama.config import Settings, get_settings
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_clock import redis_time
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import InvalidJob, JobError, RedisRefused, RedisUnreachable
from cellama.tasks.contract.keys import batch_key
from cellama.tasks.jobs import app_at

from .input_check import CheckedInput, Rules, check_input
from .leases import HeldLease, Leases
from .run_files import Parts, Schedule, clear, folder_of
from .service import BatchService

log = logging.getLogger(__name__)

POLL_S = 1.0  # between two reads of the record, which says whether the batch is to be cancelled
NOTE_S = 20.0  # for Redis to note a part
CONNECT_TIMEOUT_S = 3.0
OUTPUT_PURPOSE = "batch_output"
EXPIRED = {"code": "batch_expired", "message": "the completion window was over before this request had its answer"}


class DriverStopped(Exception):
    """This driver stops, because its gateway stops or it has lost the lease. The batch stays as it is."""


class Driver:
    """Drives one batch, in one task. What blocks is done in a thread, which asks at each of its turns whether it may
    continue. Errors of Redis, disks and workers are left to the next driver."""

    def __init__(
        self,
        settings: Settings,
        files: FileService,
        batches: BatchService,
        leases: Leases,
        held: HeldLease,
        record: Record,
    ) -> None:
        self._settings = settings
        self._files = files
        self._batches = batches
        self._leases = leases
        self._held = held
        self._record = record
        self.id: str = record["id"]
        self.tenant: str | None = record["tenant"]
        self._folder = folder_of(files.store, self.id)
        self._input = self._folder / "input.jsonl"
        self._paths = paths_of(self._folder / "output.jsonl")
        self._has_work = False  # on this machine, where other gateways do not see it
        self._stop = threading.Event()
        self._cancelled = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # set before the thread has anything to do
        # A run takes as long as its batch: in one of the loop's own threads it would be in the way of uploads.
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=self.id)

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Leave the batch as it is, soon, for another driver."""
        self._stop.set()

    async def drive(self) -> None:
        """Return when the batch has ended, or is left to another driver. Raises nothing but CancelledError."""
        async with self._watched():
            try:
                await self._steps()
            except DriverStopped as stopped:
                log.info("batch %s is left: %s", self.id, stopped)
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
        """Renew the lease, and poll whether the batch is to be cancelled."""
        renewed_at = time.monotonic()
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), POLL_S)
                return
            try:
                if time.monotonic() - renewed_at >= self._leases.renew_s:
                    await self._leases.renew(self._held)
                    renewed_at = time.monotonic()
                await self._poll()
            except (RedisError, RedisUnreachable, RedisRefused) as error:
                log.warning("the lease of batch %s was not renewed: %s", self.id, error)

    async def _poll(self) -> str:
        """Return the status of the batch. Its tenant or `cellama batch cancel` may have asked for its end."""
        if not self._cancelled.is_set() and await self._batches.take_cancel(self.id):
            await self._batches.move(self._record, "cancelling", of=("validating", "in_progress"))
        record = await self._batches.records.read(self.id)
        status: str = "cancelling" if record is None else record["status"]
        if status == "cancelling":
            self._cancelled.set()
        return status

    async def _steps(self) -> None:
        status = await self._poll()  # before the run forgets what was asked of an earlier one
        if status == "validating":
            status = await self._validate()
        elif status in ("in_progress", "cancelling") and self._record.get("total") is None:
            status = await self._end("cancelled", of=("cancelling",))  # nothing of it has begun
        if status in ("in_progress", "cancelling"):
            ends_as = await self._run()
            if ends_as is None:
                return
            status = await self._move("finalizing", of=("in_progress", "cancelling"), ends_as=ends_as)
        if status == "finalizing":
            await self._store_results()

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Do work that blocks. If this task is cancelled, the thread stops at its next turn, and is waited for."""
        self._loop = asyncio.get_running_loop()
        task = self._loop.run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.stop()
            await asyncio.gather(task, return_exceptions=True)
            raise

    def _check_lease(self) -> None:
        """Raises DriverStopped. Any thread may call it."""
        if self._stop.is_set():
            raise DriverStopped("this gateway stops")
        if not self._held.is_held:
            raise DriverStopped("its lease was lost")

    # Validation

    async def _validate(self) -> str:
        try:
            checked = await self._in_thread(self._check_input)
        except DriverStopped:
            if not self._cancelled.is_set():
                raise
            return await self._end("cancelled", of=("validating", "cancelling"))
        if checked.errors:
            status = await self._end("failed", of=("validating",), errors=checked.errors, total=0)
        else:
            found = {"total": checked.num_lines, "model": checked.model}
            status = await self._move("in_progress", of=("validating",), **found)
        return status if status != "cancelling" else await self._end("cancelled", of=("cancelling",))

    def _check_input(self) -> CheckedInput:
        """In the thread. Raises DriverStopped, also if the batch is cancelled: nothing of it has begun."""
        try:
            self._fetch_input()
        except FileNotFoundError:
            message = f"the contents of {self._record['input_file_id']!r} are gone"
            return CheckedInput(errors=[{"code": "file_not_found", "message": message, "param": None, "line": None}])
        models, adapters = (self._record.get(name) for name in ("models", "adapters"))
        caller = Caller(
            self.tenant,
            models=None if models is None else frozenset(models),
            adapters=None if adapters is None else frozenset(adapters),
        )
        rules = Rules(
            endpoint=self._record["endpoint"],
            max_lines=self._settings.gateway_max_batch_lines,
            max_line_bytes=get_settings().max_payload_bytes,  # which holds for all jobs that this process makes
            caller=caller,
        )

        def check_turn() -> None:
            self._check_lease()
            if self._cancelled.is_set():
                raise DriverStopped("it is cancelled")

        with self._input.open("rb") as stream:
            return check_input(stream, rules, check_turn)

    def _fetch_input(self) -> None:
        make_folder(self._folder)
        if not self._input.exists():
            fetch(self._files.store, self._record["input_file_id"], self._input)

    # The run

    async def _run(self) -> str | None:
        """Return the state in which the run ends, or None if the batch has failed by it."""
        try:
            state: str = await self._in_thread(self._run_in_thread)
            return state
        except (InvalidJob, FileNotFoundError) as error:
            log.warning("batch %s fails: %s", self.id, error)
            code, message = "file_not_found", "the contents of its input file are gone"
            if isinstance(error, InvalidJob):  # which names paths of this machine
                code, message = "internal_error", "its run can't go on at the gateway, whose log says why"
            errors = [{"code": code, "message": message, "param": None, "line": None}]
            await self._end("failed", of=("in_progress", "cancelling", "finalizing"), errors=errors)
            return None

    def _run_in_thread(self) -> str:
        """Run the batch as `cellama batch run` does, from where this gateway or another one left it.

        Raises DriverStopped, InvalidJob, OSError, RedisUnreachable, RedisRefused.
        """
        store = self._files.store
        parts: Parts | None = None
        self._fetch_input()
        if not store.shares_work:
            parts = Parts(store, self.id, self._record.get("parts", ()), self._record.get("parts_bytes", 0))
            if not self._has_work:  # what lies here is of an earlier driver; another machine may have gone on since
                for path in self._folder.glob("output*"):  # the work file has files beside it
                    path.unlink()
                parts.fetch(self._paths.output)
                self._has_work = True
        self._open_work_file()
        schedule, url = Schedule(), self._settings.redis_url
        with contextlib.closing(connect(url, socket_connect_timeout=CONNECT_TIMEOUT_S)) as redis:

            def turn(_: object) -> None:
                self._check_lease()
                if self._cancelled.is_set():  # the run stops at its next look
                    with contextlib.suppress(RedisError):
                        redis.hset(batch_key(self.id), "cancel", "1")
                if parts is not None and schedule.is_due():
                    self._save_part(parts)

            with reaching_redis(url):
                left_s = self._record["expires_at"] - redis_time(redis)
            options = BatchOptions(
                self._input,
                self._paths.output,
                format="jsonl",
                form="openai",
                params={"cache_scope": self.tenant} if self.tenant else {},
                deadline_s=max(0.0, left_s),
            )
            try:
                summary = run_batch(redis, app_at(url), options, lambda _: self._check_lease(), turn)
            except DriverStopped:
                if parts is not None and self._held.is_held:
                    self._save_part(parts)
                raise
            if parts is not None:
                self._save_part(parts)
            return summary.state

    def _open_work_file(self) -> None:
        """Give the run the id of its batch, so that Redis has it under the same name.

        An output without a work file is one that a driver on another machine has saved: its lines have ended.
        """
        try:
            with contextlib.closing(WorkFile(self._paths.work)) as work:
                if not work.get("run_id"):
                    work.note(run_id=self.id, **self._record.get("trace", {}))
        except sqlite3.OperationalError as error:
            if "locked" in str(error):  # by a process that has lost its lease, and does not know it yet
                raise DriverStopped("another process still has its work file") from None
            raise

    def _save_part(self, parts: Parts) -> None:
        """Store what the output has gained, so that a gateway on another machine can take over. In the thread, between
        two turns of the run."""
        if (new := parts.save(self._paths.output)) is None:
            return
        assert self._loop is not None
        noted = asyncio.run_coroutine_threadsafe(self._note_parts(*new), self._loop).result(NOTE_S)
        if not noted:
            raise DriverStopped("another gateway drives it")
        parts.saved(*new)

    async def _note_parts(self, names: list[str], size: int) -> bool:
        fields = {"parts": names, "parts_bytes": size}
        done, _ = await self._batches.records.advance(
            self.id,
            fields,
            of=("in_progress", "cancelling", "finalizing"),
            life_s=max(1, int(self._record["gone_at"] - await self._batches.records.now())),
            lease=self._held.lease,
        )
        self._record |= fields
        return done

    # The end

    async def _store_results(self) -> None:
        record = await self._batches.records.read(self.id) or self._record
        ends_as = record["ends_as"]
        if ends_as == "cancelled":
            self._cancelled.set()
        has_work = self._paths.work.exists() if self._files.store.shares_work else self._has_work
        if not has_work and await self._run() is None:  # it was on another machine
            return
        progress, errors, num_failed = await self._in_thread(lambda: self._write_errors(ends_as))
        await self._end(
            ends_as,
            of=("finalizing",),
            counts={"total": record["total"], "completed": progress.finished, "failed": num_failed},
            usage=_usage_of(progress),
            errors=[],
            output_file_id=await self._add_file("output", self._paths.output) if progress.finished else None,
            error_file_id=await self._add_file("error", errors) if num_failed else None,
        )

    def _write_errors(self, ends_as: str) -> tuple[Progress, Path, int]:
        """Write the error file: the errors of the run, and the requests for which there was no time. Return where the
        run has ended, the file, and how many errors it has. May be done again.

        A run that had completed may have requests without answers if it is repeated on another machine.
        """
        target = self._folder / "errors.final.jsonl"
        with contextlib.closing(WorkFile(self._paths.work)) as work, open_new(target) as file:
            progress = progress_of(work)
            num_failed = progress.failed
            if self._paths.errors.exists():
                with self._paths.errors.open("rb") as errors:
                    shutil.copyfileobj(errors, file)
            for number, line_id in work.open_lines() if ends_as != "cancelled" else ():
                failure = {**failure_of(line_id, f"line_{number}", EXPIRED), "line": number}
                file.write((json.dumps(failure, ensure_ascii=False) + "\n").encode())
                num_failed += 1
            file.flush()
            os.fsync(file.fileno())
        return progress, target, num_failed

    async def _add_file(self, name: str, path: Path) -> str:
        """Store a file under an id that is derived from the batch's own, so that it may be done again."""
        self._check_lease()
        file_id = f"file-{self.id.removeprefix('batch_')}-{name}"
        life_s, filename = self._record["output_life_s"], f"{self.id}_{name}.jsonl"
        await self._files.add(path, filename, OUTPUT_PURPOSE, Caller(self.tenant), life_s, file_id=file_id)
        return file_id

    async def _end(self, status: str, *, of: tuple[str, ...], **fields: Any) -> str:
        """End the batch: nothing of its run is left, and no driver looks at it any more."""
        reached = await self._move(status, of=of, **fields)
        if reached == status:
            await in_thread(FILES, clear, self._files.store, self.id)
            await self._batches.close(self.id, self.tenant)  # last: what was not cleared is found by the next driver
            await self._leases.release(self._held)
            log.info("batch %s has ended: %s", self.id, status)
        return reached

    async def _move(self, status: str, *, of: tuple[str, ...], **fields: Any) -> str:
        """Return the new status: this one, or "cancelling" if that came first. Raises DriverStopped."""
        done, now = await self._batches.move(self._record, status, of=of, lease=self._held.lease, **fields)
        if not done and now != "cancelling":
            raise DriverStopped(f"another gateway drives it; it is {now or 'gone'}")
        self._record |= {**(fields if done else {}), "status": now}
        return now


def _usage_of(progress: Progress) -> dict[str, Any]:
    """Return the tokens of a run as OpenAI's batches show them."""
    return {
        "input_tokens": progress.prompt_tokens,
        "input_tokens_details": {"cached_tokens": progress.cached_tokens},
        "output_tokens": progress.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # lines of a batch do not count them
        "total_tokens": progress.prompt_tokens + progress.completion_tokens,
    }
