"""Make Redis refuse commands with each temporary error, both while workers are idle and while they are busy.

A real Redis is configured to return each of these errors. Afterwards, the same worker processes must still be running,
and each job must have ended once, in its first attempt, with the text of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from cellama.api.machine.redis_server import LOOPBACK, free_port
from cellama.bench.harness.reference_texts import ReferenceText
from cellama.bench.harness.service import Service, wait_until
from cellama.tasks.contract.keys import job_key, running_key

from .outcomes import broken_promises, is_clean
from .scenario import SLOTS, Scenario, shown

REFUSALS = ("NOREPLICAS", "MISCONF", "READONLY", "OOM", "BUSY", "LOADING", "UNBLOCKED")
PROBE_S = 0.1  # seconds between two checks whether Redis still refuses
SLOW_S = 0.05  # seconds per step while Redis refuses, so that jobs of 120 tokens and more outlast the refusal
PING_S = 2.0
MOST_JOBS = 48  # per refusal
IDLE_JOBS = 8  # queued after a refusal that met idle workers
SCRIPT_LIMIT_MS = 50  # until Redis replies BUSY while a script runs; 5 s by default
LOAD_DELAY_US = 200  # for each command that is loaded
PROBE_KEY = "chaos:probe"
_SAID = {  # part of the reply to a write in each state; redis-py removes some codes
    "NOREPLICAS": "NOREPLICAS",
    "MISCONF": "MISCONF",
    "READONLY": "read only replica",
    "OOM": "used memory > 'maxmemory'",
    "BUSY": "BUSY",
    "LOADING": "loading",
}


class Refuser:
    """Makes the service's Redis refuse commands for a while."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._redis = self._connect()
        self.num_refused = 0  # refused writes of this process or, with UNBLOCKED, reads of the workers

    def _connect(self) -> Redis:
        return Redis.from_url(self._service.redis_server.url, socket_timeout=None, retry=Retry(NoBackoff(), 0))

    def refuse(self, code: str, seconds: float) -> None:
        """Make Redis refuse commands with `code` for `seconds`. Raises RuntimeError if Redis accepts a command."""
        self.num_refused = 0
        others = {"LOADING": self._load, "UNBLOCKED": self._unblock}
        others[code](seconds) if code in others else self._hold(code, seconds)
        wait_until(lambda: self._answer() == "", "Redis accepts writes again")

    def _hold(self, code: str, seconds: float) -> None:
        with getattr(self, f"_{code.lower()}")():
            wait_until(lambda: _SAID[code] in self._answer(), f"Redis refuses with {code}")
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                if _SAID[code] not in (said := self._answer()):
                    raise RuntimeError(f"Redis replied {said!r} instead of {code}")
                self.num_refused += 1
                time.sleep(PROBE_S)

    def _answer(self) -> str:
        """Return Redis's error for a write, or an empty string if Redis accepts the write."""
        try:
            self._redis.set(PROBE_KEY, 1)
        except RedisError as error:
            return str(error)
        return ""

    @contextlib.contextmanager
    def _set(self, name: str, value: str | int, before: str | int) -> Iterator[None]:
        self._redis.config_set(name, value)
        try:
            yield
        finally:
            self._redis.config_set(name, before)

    def _noreplicas(self) -> contextlib.AbstractContextManager[None]:
        return self._set("min-replicas-to-write", 1, 0)

    def _oom(self) -> contextlib.AbstractContextManager[None]:
        return self._set("maxmemory", 1, 0)

    @contextlib.contextmanager
    def _misconf(self) -> Iterator[None]:
        """Make snapshots fail by creating a directory with the name of the snapshot file."""
        in_the_way = self._service.redis_server.data_dir / "dump.rdb"
        in_the_way.mkdir()
        self._redis.bgsave()
        wait_until(lambda: self._persistence()["rdb_last_bgsave_status"] == "err", "a snapshot that fails")
        with self._set("save", "3600 1", ""):
            yield
        in_the_way.rmdir()

    @contextlib.contextmanager
    def _readonly(self) -> Iterator[None]:
        """Make Redis a read-only replica of a missing master."""
        self._redis.replicaof(LOOPBACK, str(free_port()))
        try:
            yield
        finally:
            self._redis.replicaof("NO", "ONE")

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        def run() -> None:
            with self._connect() as redis, contextlib.suppress(ResponseError):  # it is killed
                redis.eval("while true do end", 0)

        with self._set("lua-time-limit", SCRIPT_LIMIT_MS, 5000):
            script = threading.Thread(target=run)
            script.start()
            try:
                yield
            finally:
                self._redis.script_kill()
                script.join()

    def _load(self, seconds: float) -> None:
        """Restart Redis so that it loads its data slowly."""
        self._redis.bgrewriteaof()  # so that it takes the time for what is added now, and little more
        wait_until(lambda: not self._persistence()["aof_rewrite_in_progress"], "data in a few commands")
        pipeline = self._redis.pipeline(transaction=False)
        for number in range(int(seconds * 1e6 / LOAD_DELAY_US)):
            pipeline.set(PROBE_KEY, number)
        pipeline.execute()
        ready = threading.Event()
        probing = threading.Thread(target=self._probe_loading, args=(ready,))
        probing.start()
        self._service.restart_redis(load_delay_us=LOAD_DELAY_US)
        ready.set()
        probing.join()
        if not self.num_refused:
            raise RuntimeError("no client has observed Redis loading its data")

    def _probe_loading(self, ready: threading.Event) -> None:
        while not ready.wait(PROBE_S):
            self.num_refused += _SAID["LOADING"] in self._answer()

    def _unblock(self, seconds: float) -> None:
        """Repeatedly unblock waiting clients with an error."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for client in self._redis.client_list():
                if "b" in client["flags"]:
                    self.num_refused += int(self._redis.client_unblock(int(client["id"]), error=True))
            time.sleep(PROBE_S)
        if not self.num_refused:
            raise RuntimeError("no worker waited for a message")

    def _persistence(self) -> dict[str, Any]:
        found: dict[str, Any] = self._redis.info("persistence")
        return found


class RefusalScenario(Scenario):
    """A scenario in which Redis refuses commands while the workers are idle and while they are busy."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        super().__init__(service, args)
        self._refuser = Refuser(service)

    def refusals(self, undisturbed: Sequence[ReferenceText]) -> tuple[list[dict[str, Any]], list[str]]:
        """Make Redis refuse commands with each code, and return rows and violations."""
        rows = [
            shown(self._run_one(code, when, undisturbed)) for code in self._args.refusals for when in ("idle", "busy")
        ]
        return rows, [line for row in rows for line in _wrong(row)]

    def _run_one(self, code: str, when: str, undisturbed: Sequence[ReferenceText]) -> dict[str, Any]:
        pids = {name: process.pid for name, process in self._service.processes.items()}
        refuse = functools.partial(self._refuser.refuse, code, self._args.refused)
        num_running = 0
        with self._service.counting_results() as stored, self._supervised():
            if when == "idle":
                wait_until(lambda: is_clean(self._service.redis, []), "idle workers")
                refuse()
                jobs = self.submit(count=IDLE_JOBS)
            else:
                with self._service.slowed(SLOW_S):
                    # UNBLOCKED meets workers that wait for a message, so these have room for more jobs
                    jobs = self.submit(count=SLOTS * len(pids) if code == "UNBLOCKED" else MOST_JOBS)
                    num_running = wait_until(lambda: self._num_running(list(pids.values())), "every worker busy")
                    refuse()
            texts = [self._text(job) for job in jobs]
            wait_until(self._all_serve, "workers that answer")
        ids = [job.id for job in jobs]
        unacked = wait_until(lambda: is_clean(self._service.redis, ids) and "0", "every message acked")
        same = pids.items() & {name: process.pid for name, process in self._service.processes.items()}.items()
        return {
            "scenario": "refusals",
            "refusal": code,
            "workers": when,
            "refused": self._refuser.num_refused,
            "running": num_running,
            "jobs": len(jobs),
            **self.check(jobs, texts, undisturbed[: len(jobs)]),
            "stored twice": stored.num_twice(),
            "unacked": unacked,
            "alive": f"{len(same)}/{len(pids)}",
        }

    def _num_running(self, pids: Sequence[int]) -> int:
        """Return the number of running jobs that have tokens, or 0 until every worker runs its share of these jobs."""
        redis: Any = self._service.redis
        pipeline = redis.pipeline()
        for raw in redis.zrange(running_key(), 0, -1):
            pipeline.hmget(job_key(raw.decode()), "worker", "next_seq")
        running = [int(worker.split()[-2]) for worker, seq in pipeline.execute() if worker and int(seq or 0) > 1]
        share = min(SLOTS, MOST_JOBS // len(pids), self._args.jobs // len(pids)) // 2  # half of the jobs stream
        return len(running) if all(running.count(pid) >= share for pid in pids) else 0

    def _all_serve(self) -> bool:
        """Return whether all workers respond. A worker that treated a refusal as permanent no longer responds."""
        from cellama.tasks import app

        names = [f"{name}@bench" for name in self._service.processes]
        with contextlib.suppress(RedisError, OperationalError):  # a connection from before a restart
            return len(app.control.ping(destination=names, timeout=PING_S)) == len(names)
        return False

    @contextlib.contextmanager
    def _supervised(self) -> Iterator[None]:
        """Restart workers that exit within the `with` block."""
        closing = threading.Event()

        def look() -> None:
            while not closing.wait(PROBE_S):
                for name, process in list(self._service.processes.items()):
                    if process.poll() is not None:
                        self._service.start_worker(name)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join()


def _wrong(row: dict[str, Any]) -> list[str]:
    """Return a line for each violated guarantee."""
    where = f"refusals: {row['refusal']} with {row['workers']} workers"
    lines = broken_promises(where, row, ("results", "attempts"), ("torn", "texts off", "stored twice"))
    same, all_ = row["alive"].split("/")
    return lines + [f"{where}: {row['alive']} of the worker processes are still running"] * (same != all_)
