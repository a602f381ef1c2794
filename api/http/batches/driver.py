"""Drive one batch while this gateway holds its lease.

A driver reads the input, runs it, and stores the results as files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import RedisError

from cellama.api.batch.options import BatchOptions, Progress
from cellama.api.batch.run import progress_of
from cellama.api.batch.start import paths_of, run_batch
from cellama.api.batch.work import WorkFile
from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError
from cellama.api.http.files.records import Record
from cellama.api.http.files.service import FileService
from cellama.api.http.files.store import blocks_of, download, make_directory, write_new
from cellama.api.openai.answers import failure_of
from cellama.config import Settings
from cellama.config.logging import event_logger
from cellama.tasks.connection.connections import connect, redis_time
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import InvalidJob, JobError, RedisRefused, RedisUnreachable
from cellama.tasks.jobs import app_at
from cellama.tasks.state.bulk_runs import Batches

from .input_check import InputCheck, InputRefused
from .leases import GatewayLease
from .run_files import Parts, delete_run, run_directory
from .service import OPEN, BatchService

log = event_logger(__name__)

T = TypeVar("T")

POLL_S = 1.0  # between two reads of the record, which shows whether the batch was cancelled
CONNECT_TIMEOUT_S = 3.0  # shorter than the time between two renewals of a lease
OUTPUT_PURPOSE = "batch_output"
EXPIRED = {"code": "batch_expired", "message": "the completion window ended before this request was answered"}


class DriverStopped(Exception):
    """The gateway is stopping or the lease was lost, so the driver must stop before its batch ends."""


class BatchDriver:
    """Drives one batch in its own thread. In each iteration of the run, the thread checks whether it may continue.

    While the thread runs, the event loop renews the lease and checks whether the batch was cancelled. The thread uses
    the event loop's Redis clients through `_await`.
    """

    def __init__(
        self, settings: Settings, files: FileService, batches: BatchService, lease: GatewayLease, record: Record
    ) -> None:
        self._settings = settings
        self._files = files
        self._batches = batches
        self._lease = lease
        self._record = record
        self.id: str = record["id"]
        self.tenant: str | None = record["tenant"]
        self._directory = run_directory(files.store, self.id)
        self._input = self._directory / "input.jsonl"
        self._paths = paths_of(self._directory / "output.jsonl")
        self._has_work_file = False  # set only if the store does not share the file with other machines
        self._stop = threading.Event()
        self._cancelled = threading.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the driver to release the batch soon so that another driver can take over."""
        self._stop.set()

    async def drive(self) -> None:
        """Drive the batch until it ends or is released to another driver. Raises only CancelledError."""
        self._loop = asyncio.get_running_loop()
        # Not in one of the loop's own threads: a run takes as long as its batch, and would delay uploads.
        threads = ThreadPoolExecutor(1, thread_name_prefix=self.id)
        driving = self._loop.run_in_executor(threads, self._drive)
        try:
            while not driving.done():
                await asyncio.wait([driving], timeout=POLL_S)
                if not driving.done():
                    await self._watch()
        except asyncio.CancelledError:
            self.stop()
            await asyncio.wait([driving])
            raise
        finally:
            threads.shutdown(wait=False)

    async def _watch(self) -> None:
        try:
            if self._lease.is_due:
                await self._lease.renew()
            await self._poll()
        except (RedisError, RedisUnreachable, RedisRefused) as error:
            log.warning("batch lease not renewed", batch=self.id, detail=f"{error}; retrying in {POLL_S:g} s")

    async def _poll(self) -> str:
        """Return the batch's status, after applying a pending `cellama batch cancel`."""
        if not self._cancelled.is_set() and await self._batches.take_cancel(self.id):
            await self._batches.move(self._record, "cancelling", expected=("validating", "in_progress"))
        record = await self._batches.records.read(self.id)
        status: str = "cancelling" if record is None else record["status"]
        if status == "cancelling":
            self._cancelled.set()
        return status

    # In the thread

    def _await(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _drive(self) -> None:
        url = self._settings.redis_url
        try:
            with contextlib.closing(connect(url, socket_connect_timeout=CONNECT_TIMEOUT_S)) as redis:
                self._run_and_finish(redis)
        except DriverStopped as stopped:
            log.info("batch released", batch=self.id, detail=f"{stopped}; another driver will take over the batch")
            self._await(self._lease.release())
        except (OSError, sqlite3.Error, RedisError, JobError, ApiError) as error:
            # The lease is not released, which delays the next attempt until it expires.
            log.warning("batch interrupted", batch=self.id, detail=f"{error}; the batch resumes when its lease expires")
        except Exception:
            log.exception("batch interrupted", batch=self.id, detail="unexpected error; the batch will be retried")

    def _run_and_finish(self, redis: Redis) -> None:
        status = self._await(self._poll())  # before the run, which would discard an earlier `cellama batch cancel`
        if status == "cancelling" and not self._has_started:
            self._end("cancelled", expected=("cancelling",))
        elif status in ("validating", "in_progress", "cancelling"):
            ends_as = self._run(redis)
            if ends_as is not None:
                status = self._move("finalizing", expected=("in_progress", "cancelling"), ends_as=ends_as)
        if status == "finalizing":
            self._store_results(redis)

    @property
    def _has_started(self) -> bool:
        """Whether the input was read without errors."""
        return self._record.get("total") is not None

    def _check_turn(self) -> None:
        """Raise DriverStopped if this driver must stop, or InputRefused if the batch was cancelled before starting."""
        if self._stop.is_set():
            raise DriverStopped("the gateway is stopping")
        if not self._lease.is_held:
            raise DriverStopped("the lease was lost")
        if self._cancelled.is_set() and not self._has_started:
            raise InputRefused([])

    def _run(self, redis: Redis) -> str | None:
        """Run the batch. Return the run's final status, or None if this method has already ended the batch."""
        try:
            return self._run_file(redis)
        except InputRefused as refused:
            Batches(redis).forget(self.id)  # no bulk run was started
            if not self._cancelled.is_set():
                self._end("failed", expected=("validating",), errors=refused.errors, total=0)
            if self._cancelled.is_set():  # `_end` may have set it
                self._end("cancelled", expected=("validating", "cancelling"))
            return None
        except FileNotFoundError:
            file_id = self._record["input_file_id"]
            code, message = "file_not_found", f"the contents of {file_id!r} no longer exist; upload the file again"
        except InvalidJob as error:  # its message has paths of this machine
            log.warning("batch failed", batch=self.id, detail=error)
            code, message = "internal_error", "the gateway can't continue the run; its log has the reason"
        errors = [{"code": code, "message": message, "param": None, "line": None}]
        self._end("failed", expected=OPEN, errors=errors)
        return None

    def _run_file(self, redis: Redis) -> str:
        """Run the batch as `cellama batch run` does, or resume it where the last driver stopped.

        Raises DriverStopped, InvalidJob, OSError, RedisUnreachable and RedisRefused.
        """
        store = self._files.store
        make_directory(self._directory)
        if not self._input.exists():
            download(store, self._record["input_file_id"], self._input)
        parts: Parts | None = None
        if not store.shares_work:
            parts = Parts(store, self.id, self._record.get("parts", ()), self._record.get("parts_bytes", 0))
            if not self._has_work_file:  # files of an earlier driver are outdated if another machine has continued
                for path in self._directory.glob("output*"):  # with the files that SQLite adds to the work file
                    path.unlink()
                parts.download(self._paths.output)
                self._has_work_file = True
        self._prepare_work_file()

        def after_turn(_: Progress) -> None:
            self._check_turn()
            if self._cancelled.is_set():  # the run reads this in one of its next turns
                with contextlib.suppress(RedisError):
                    Batches(redis).cancel(self.id)
            if parts is not None and parts.is_due():
                self._save_part(parts)

        with reaching_redis(self._settings.redis_url):
            remaining_s = self._record["expires_at"] - redis_time(redis)
        options = BatchOptions(
            self._input,
            self._paths.output,
            format="jsonl",
            form="openai",
            params={"cache_scope": self.tenant} if self.tenant else {},
            deadline_s=max(0.0, remaining_s),
            keep_work=True,  # until the results are stored
        )
        try:
            app, check = app_at(self._settings.redis_url), None if self._has_started else self._input_check()
            summary = run_batch(redis, app, options, lambda _: self._check_turn(), after_turn, check)
        except DriverStopped:
            if parts is not None and self._lease.is_held:
                self._save_part(parts)
            raise
        if parts is not None:
            self._save_part(parts)
        return summary.state

    def _input_check(self) -> InputCheck:
        models, adapters = self._record.get("models"), self._record.get("adapters")
        caller = Caller(
            self.tenant,
            models=None if models is None else frozenset(models),
            adapters=None if adapters is None else frozenset(adapters),
        )

        def start(num_lines: int, model: str | None) -> None:
            if self._move("in_progress", expected=("validating",), total=num_lines, model=model) == "cancelling":
                raise InputRefused([])

        return InputCheck(self._record["endpoint"], self._settings.gateway_max_batch_lines, caller, start)

    def _prepare_work_file(self) -> None:
        """Set the run's id to the batch's id.

        The run is also recorded in Redis under this id. If only the output exists, it was assembled from the parts that
        a driver on another machine stored. The lines in the assembled output are then marked as finished in the new
        work file.
        """
        try:
            with contextlib.closing(WorkFile(self._paths.work)) as work:
                if not work.get("run_id"):
                    work.set(run_id=self.id, **self._record.get("trace", {}))
        except sqlite3.OperationalError as error:
            if "locked" in str(error):  # by a process that has not noticed yet that it has lost its lease
                raise DriverStopped("the work file is still open in another process") from None
            raise

    def _save_part(self, parts: Parts) -> None:
        """Store the latest part of the output so that a gateway on another machine can take over."""
        if parts.save(self._paths.output):
            fields = {"parts": parts.names, "parts_bytes": parts.num_bytes}
            done, _ = self._await(
                self._batches.change(self._record, fields, expected=OPEN, lease_token=self._lease.token)
            )
            if not done:
                raise DriverStopped("another gateway is driving the batch")
            self._record |= fields

    # End of the batch

    def _store_results(self, redis: Redis) -> None:
        """Store the output and the errors as files, and end the batch. This method can be called repeatedly."""
        record = self._await(self._batches.records.read(self.id)) or self._record
        ends_as = record["ends_as"]
        if ends_as == "cancelled":
            self._cancelled.set()
        has_work_file = self._paths.work.exists() if self._files.store.shares_work else self._has_work_file
        if not has_work_file and self._run(redis) is None:  # the run was on another machine
            return
        errors = self._directory / "errors.final.jsonl"
        with contextlib.closing(WorkFile(self._paths.work)) as work:
            progress = progress_of(work)
            # A completed run that is repeated on another machine may have requests without answers.
            expired = list(work.open_lines()) if ends_as != "cancelled" else []
        write_new(errors, self._error_blocks(expired))
        num_failed = progress.failed + len(expired)
        self._end(
            ends_as,
            expected=("finalizing",),
            counts={"total": record["total"], "completed": progress.finished, "failed": num_failed},
            usage=_usage_of(progress),
            errors=[],
            output_file_id=self._add_file("output", self._paths.output) if progress.finished else None,
            error_file_id=self._add_file("error", errors) if num_failed else None,
        )

    def _error_blocks(self, expired: list[tuple[int, Any]]) -> Iterator[bytes]:
        """Yield the run's errors, and an error for each request that did not finish in time."""
        if self._paths.errors.exists():
            yield from blocks_of(self._paths.errors.open("rb"))
        for number, line_id in expired:
            failure = {**failure_of(line_id, f"line_{number}", EXPIRED), "line": number}
            yield (json.dumps(failure, ensure_ascii=False) + "\n").encode()

    def _add_file(self, name: str, path: Path) -> str:
        """Store a file. The file's id is derived from the batch's id, so repeating the call replaces the file."""
        self._check_turn()
        file_id = f"file-{self.id.removeprefix('batch_')}-{name}"
        life_s, filename = self._record["output_life_s"], f"{self.id}_{name}.jsonl"
        self._await(self._files.add(path, filename, OUTPUT_PURPOSE, Caller(self.tenant), life_s, file_id=file_id))
        return file_id

    def _end(self, status: str, *, expected: tuple[str, ...], **fields: Any) -> None:
        """End the batch and delete its run's files, unless the batch has been cancelled in the meantime."""
        if self._move(status, expected=expected, **fields) == status:
            delete_run(self._files.store, self.id)
            self._await(self._batches.close(self.id, self.tenant))  # after the deletion, which is repeated without it
            self._await(self._lease.release())
            log.info("batch ended", batch=self.id, status=status)

    def _move(self, status: str, *, expected: tuple[str, ...], **fields: Any) -> str:
        """Change the batch's status, and return the new status.

        The new status is "cancelling" if the batch was already cancelled. Raises DriverStopped.
        """
        token = self._lease.token
        done, now = self._await(
            self._batches.move(self._record, status, expected=expected, lease_token=token, **fields)
        )
        if not done and now != "cancelling":
            raise DriverStopped(f"another gateway is driving the batch, whose status is now {now or 'deleted'}")
        if now == "cancelling":
            self._cancelled.set()
        self._record |= {**(fields if done else {}), "status": now}
        return now


def _usage_of(progress: Progress) -> dict[str, Any]:
    """Return a run's token counts in OpenAI's batch format."""
    return {
        "input_tokens": progress.prompt_tokens,
        "input_tokens_details": {"cached_tokens": progress.cached_tokens},
        "output_tokens": progress.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # bulk runs do not count them
        "total_tokens": progress.prompt_tokens + progress.completion_tokens,
    }
