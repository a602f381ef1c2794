"""One batch, driven by this gateway while its lease holds: its input is read, it is run, its results become files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
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
from cellama.api.http.files.store import blocks_of, fetch, make_folder, write_new
from cellama.api.openai.answers import failure_of
from cellama.config import Settings
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_clock import redis_time
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import InvalidJob, JobError, RedisRefused, RedisUnreachable
from cellama.tasks.jobs import app_at
from cellama.tasks.state.bulk_runs import Batches

from .input_check import InputCheck, InputRefused
from .leases import GatewayLease
from .run_files import Parts, clear, folder_of
from .service import BatchService

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 1.0  # between two reads of the record, which says whether the batch is to be cancelled
CONNECT_TIMEOUT_S = 3.0  # shorter than the time between two renewals of a lease
OUTPUT_PURPOSE = "batch_output"
EXPIRED = {"code": "batch_expired", "message": "the completion window was over before this request had its answer"}


class DriverStopped(Exception):
    """This driver stops, because its gateway stops or it has lost the lease. The batch stays as it is."""


class Driver:
    """Drives one batch in a thread, which checks at each turn whether it may continue. What needs the event loop, which
    has the clients of Redis, is done there (`_do`). The loop renews the lease and polls whether the batch is cancelled.
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
        self._folder = folder_of(files.store, self.id)
        self._input = self._folder / "input.jsonl"
        self._paths = paths_of(self._folder / "output.jsonl")
        self._has_work = False  # on this machine, where other gateways do not see it
        self._stop = threading.Event()
        self._cancelled = threading.Event()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Leave the batch as it is, soon, for another driver."""
        self._stop.set()

    async def drive(self) -> None:
        """Return when the batch has ended, or is left to another driver. Raises nothing but CancelledError."""
        self._loop = asyncio.get_running_loop()
        # A run takes as long as its batch: in one of the loop's own threads it would be in the way of uploads.
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
            log.warning("batch %s: can't renew its lease: %s", self.id, error)

    async def _poll(self) -> str:
        """Return the status of the batch. Its tenant or `cellama batch cancel` may have asked for its end."""
        if not self._cancelled.is_set() and await self._batches.take_cancel(self.id):
            await self._batches.move(self._record, "cancelling", of=("validating", "in_progress"))
        record = await self._batches.records.read(self.id)
        status: str = "cancelling" if record is None else record["status"]
        if status == "cancelling":
            self._cancelled.set()
        return status

    # In the thread

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def _drive(self) -> None:
        url = self._settings.redis_url
        try:
            with contextlib.closing(connect(url, socket_connect_timeout=CONNECT_TIMEOUT_S)) as redis:
                self._take_steps(redis)
        except DriverStopped as stopped:
            log.info("batch %s is left: %s", self.id, stopped)
            self._do(self._lease.release())
        except (OSError, sqlite3.Error, RedisError, JobError, ApiError) as error:
            # The lease is kept: the next try is when it ends.
            log.warning("batch %s can't continue now; another try follows: %s", self.id, error)
        except Exception:
            log.exception("batch %s: unforeseen error; another try follows", self.id)

    def _take_steps(self, redis: Redis) -> None:
        status = self._do(self._poll())  # before the run forgets what was asked of an earlier one
        if status == "cancelling" and not self._has_begun:
            self._end("cancelled", of=("cancelling",))
        elif status in ("validating", "in_progress", "cancelling"):
            ends_as = self._run(redis)
            if ends_as is not None:
                status = self._move("finalizing", of=("in_progress", "cancelling"), ends_as=ends_as)
        if status == "finalizing":
            self._store_results(redis)

    @property
    def _has_begun(self) -> bool:
        """Whether its input was read without errors, so that it runs."""
        return self._record.get("total") is not None

    def _check_turn(self) -> None:
        """Raises DriverStopped, or InputRefused if nothing has begun of a batch that is cancelled."""
        if self._stop.is_set():
            raise DriverStopped("this gateway stops")
        if not self._lease.is_held:
            raise DriverStopped("its lease was lost")
        if self._cancelled.is_set() and not self._has_begun:
            raise InputRefused([])

    def _run(self, redis: Redis) -> str | None:
        """Return the state in which the run ends, or None if that was also the end of the batch."""
        try:
            return self._run_file(redis)
        except InputRefused as refused:
            Batches(redis).forget(self.id)  # no bulk run has begun
            if not self._cancelled.is_set():
                self._end("failed", of=("validating",), errors=refused.errors, total=0)
            if self._cancelled.is_set():  # perhaps a moment ago
                self._end("cancelled", of=("validating", "cancelling"))
            return None
        except FileNotFoundError:
            code, message = "file_not_found", f"the contents of {self._record['input_file_id']!r} are gone"
        except InvalidJob as error:  # which names paths of this machine
            log.warning("batch %s fails: %s", self.id, error)
            code, message = "internal_error", "its run can't continue at the gateway, whose log says why"
        errors = [{"code": code, "message": message, "param": None, "line": None}]
        self._end("failed", of=("validating", "in_progress", "cancelling", "finalizing"), errors=errors)
        return None

    def _run_file(self, redis: Redis) -> str:
        """Run the batch as `cellama batch run` does, from where this gateway or another one left it.

        Raises DriverStopped, InvalidJob, OSError, RedisUnreachable, RedisRefused.
        """
        store = self._files.store
        make_folder(self._folder)
        if not self._input.exists():
            fetch(store, self._record["input_file_id"], self._input)
        parts: Parts | None = None
        if not store.shares_work:
            parts = Parts(store, self.id, self._record.get("parts", ()), self._record.get("parts_bytes", 0))
            if not self._has_work:  # what lies here is of an earlier driver; another machine may have continued since
                for path in self._folder.glob("output*"):  # the work file has files beside it
                    path.unlink()
                parts.fetch(self._paths.output)
                self._has_work = True
        self._prepare_work_file()

        def turn(_: Progress) -> None:
            self._check_turn()
            if self._cancelled.is_set():  # the run stops at its next look
                with contextlib.suppress(RedisError):
                    Batches(redis).cancel(self.id)
            if parts is not None and parts.is_due():
                self._save_part(parts)

        with reaching_redis(self._settings.redis_url):
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
            app, check = app_at(self._settings.redis_url), None if self._has_begun else self._input_check()
            summary = run_batch(redis, app, options, lambda _: self._check_turn(), turn, check)
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

        def begin(num_lines: int, model: str | None) -> None:
            if self._move("in_progress", of=("validating",), total=num_lines, model=model) == "cancelling":
                raise InputRefused([])

        return InputCheck(self._record["endpoint"], self._settings.gateway_max_batch_lines, caller, begin)

    def _prepare_work_file(self) -> None:
        """Give the run the id of its batch, so that Redis has it under the same name.

        An output without a work file is one that a driver on another machine has saved: its lines have ended.
        """
        try:
            with contextlib.closing(WorkFile(self._paths.work)) as work:
                if not work.get("run_id"):
                    work.note(run_id=self.id, **self._record.get("trace", {}))
        except sqlite3.OperationalError as error:
            if "locked" in str(error):  # by a process that has lost its lease, and has not noticed yet
                raise DriverStopped("another process still has its work file") from None
            raise

    def _save_part(self, parts: Parts) -> None:
        """Store what the output has gained, so that a gateway on another machine can take over."""
        if parts.save(self._paths.output):
            fields = {"parts": parts.names, "parts_bytes": parts.num_bytes}
            open_statuses = ("validating", "in_progress", "cancelling", "finalizing")
            done, _ = self._do(self._batches.change(self._record, fields, of=open_statuses, lease_token=self._token))
            if not done:
                raise DriverStopped("another gateway drives it")
            self._record |= fields

    @property
    def _token(self) -> str:
        return self._lease.token

    # The end

    def _store_results(self, redis: Redis) -> None:
        """Store the output and the errors as files, and end the batch. May be done again."""
        record = self._do(self._batches.records.read(self.id)) or self._record
        ends_as = record["ends_as"]
        if ends_as == "cancelled":
            self._cancelled.set()
        has_work = self._paths.work.exists() if self._files.store.shares_work else self._has_work
        if not has_work and self._run(redis) is None:  # it was on another machine
            return
        errors = self._folder / "errors.final.jsonl"
        with contextlib.closing(WorkFile(self._paths.work)) as work:
            progress = progress_of(work)
            # A run that had completed may have requests without answers if it is repeated on another machine.
            expired = list(work.open_lines()) if ends_as != "cancelled" else []
        write_new(errors, self._error_blocks(expired))
        num_failed = progress.failed + len(expired)
        self._end(
            ends_as,
            of=("finalizing",),
            counts={"total": record["total"], "completed": progress.finished, "failed": num_failed},
            usage=_usage_of(progress),
            errors=[],
            output_file_id=self._add_file("output", self._paths.output) if progress.finished else None,
            error_file_id=self._add_file("error", errors) if num_failed else None,
        )

    def _error_blocks(self, expired: list[tuple[int, Any]]) -> Iterator[bytes]:
        """The errors of the run, and the requests for which there was no time."""
        if self._paths.errors.exists():
            yield from blocks_of(self._paths.errors.open("rb"))
        for number, line_id in expired:
            failure = {**failure_of(line_id, f"line_{number}", EXPIRED), "line": number}
            yield (json.dumps(failure, ensure_ascii=False) + "\n").encode()

    def _add_file(self, name: str, path: Path) -> str:
        """Store a file under an id that is derived from the batch's own, so that it may be done again."""
        self._check_turn()
        file_id = f"file-{self.id.removeprefix('batch_')}-{name}"
        life_s, filename = self._record["output_life_s"], f"{self.id}_{name}.jsonl"
        self._do(self._files.add(path, filename, OUTPUT_PURPOSE, Caller(self.tenant), life_s, file_id=file_id))
        return file_id

    def _end(self, status: str, *, of: tuple[str, ...], **fields: Any) -> None:
        """End the batch: nothing of its run is left, and no driver looks at it any more. If it is cancelled instead,
        nothing changes."""
        if self._move(status, of=of, **fields) == status:
            clear(self._files.store, self.id)
            self._do(self._batches.close(self.id, self.tenant))  # last: the next driver clears what is left
            self._do(self._lease.release())
            log.info("batch %s has ended: %s", self.id, status)

    def _move(self, status: str, *, of: tuple[str, ...], **fields: Any) -> str:
        """Return the new status: this one, or "cancelling" if that came first. Raises DriverStopped."""
        done, now = self._do(self._batches.move(self._record, status, of=of, lease_token=self._token, **fields))
        if not done and now != "cancelling":
            raise DriverStopped(f"another gateway drives it; it is {now or 'gone'}")
        if now == "cancelling":
            self._cancelled.set()
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
