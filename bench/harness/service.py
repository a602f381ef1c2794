"""Run a separate service for benchmarks.

The service consists of a Redis server and workers that can be killed. The producers run in this process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import mmap
import os
import secrets
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cellama.api.machine.redis_server import RedisServer, die_with, free_port
from cellama.api.machine.supervisor import worker_argv
from cellama.config import get_settings
from cellama.engine.core.telemetry import Telemetry
from cellama.engine.scheduling.strategies import SlotView, TokenAllocation
from cellama.tasks.connection.connections import connect
from cellama.tasks.state.registry import live_workers

from . import fatal_points
from .pace import PACE_FILE, Paced, slowed
from .skewed_clock import environment_of

PATIENCE_S = 300.0
POISON_TOKENS = 666  # a prompt with this number of tokens crashes a worker with the FragileStrategy
COUNTER_DIR = "BENCH_COUNTERS"  # environment variable of the worker
_COUNT = struct.Struct("<q")  # number of tokens that a worker sampled


def _count_sampled(path: Path) -> None:
    """Count the tokens that this worker's engines sample. The count is stored in a file, so it survives SIGKILL."""
    path.write_bytes(bytes(_COUNT.size))
    with path.open("r+b") as file:
        counter = mmap.mmap(file.fileno(), _COUNT.size)
    account, numbers, lock = Telemetry.token, itertools.count(1), threading.Lock()

    def token(self: Telemetry, gap_s: float | None = None) -> None:
        with lock:
            counter[:] = _COUNT.pack(next(numbers))
        account(self, gap_s)

    Telemetry.token = token  # type: ignore[method-assign]


def num_sampled(counters: Path) -> int:
    """Return the number of tokens sampled by all workers that count in this directory, including dead ones."""
    return sum(_COUNT.unpack(path.read_bytes())[0] for path in counters.iterdir())


if COUNTER_DIR in os.environ:  # this is a worker
    _count_sampled(Path(os.environ[COUNTER_DIR]) / f"{os.getpid()}.{time.monotonic_ns()}")

if fatal_points.DIRECTORY in os.environ:  # this is a worker that may die at one of them
    fatal_points.install()


class CountingStrategy(Paced):
    """Behaves like Paced. Workers that load this strategy import this module, which counts sampled tokens."""


class FragileStrategy(CountingStrategy):
    """A strategy that kills its worker when a prompt has at least POISON_TOKENS tokens left to compute.

    A new attempt computes the text of earlier attempts like a prompt. Therefore, the prompt and text of every other job
    must be shorter than POISON_TOKENS.
    """

    def build_batch(
        self, slots: Sequence[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        if any(view.num_pending >= POISON_TOKENS for view in slots):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().build_batch(slots, budget, chunk_size, queue_depth)


@functools.cache
def _redis_port() -> int:
    """Return the port for all services of this process, because Celery reads its configuration once."""
    return free_port()


@functools.cache
def _redis_password() -> str:
    """Return the password for all services of this process, because Celery reads its configuration once."""
    return secrets.token_urlsafe(24)


class StoredStates:
    """The final states that were stored for each job id."""

    def __init__(self) -> None:
        self.states: dict[str, list[str]] = {}
        self.num_lost = 0

    def forget_lost(self, since: set[str], redis: Any) -> None:
        """Forget the states of jobs that may store a state again.

        These are jobs whose state Redis has lost, and jobs that are not in `since`.
        """
        for job_id in list(self.states):
            if not redis.exists(f"celery-task-meta-{job_id}"):
                self.num_lost += 1
            elif job_id in since:
                continue
            del self.states[job_id]

    def num_twice(self) -> int:
        return sum(len(states) for states in self.states.values() if len(states) > 1)


@dataclass
class SlowRedis(RedisServer):
    """A Redis server that can be made to load its data slowly."""

    load_delay_us: int = 0  # for each command of the append-only file

    def _config(self, data_dir: Path) -> str:
        return super()._config(data_dir) + f"key-load-delay {self.load_delay_us}\n"


class Service:
    """A Redis server and workers. Use the service as a context manager.

    Within the block, this process can send jobs to the workers.
    """

    def __init__(self, folder: Path, models: Sequence[dict[str, Any]], **settings: str) -> None:
        self.folder = folder
        self.fatal_points = folder / "fatal_points"
        self.dies_at_points = False  # whether workers kill themselves at the points that are marked there
        self.redis_server: Any = SlowRedis(0, folder / "redis")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ahead_s: dict[str, float] = {}  # seconds that a worker's clock is ahead, even after a restart
        self.num_starts = 0
        self._models = [dict(model) for model in models]
        self._settings = settings
        self._names = (f"worker{number}" for number in itertools.count())
        # Child processes end with the thread that started them, so this thread must live as long as they do.
        self._starter = ThreadPoolExecutor(max_workers=1)

    def __enter__(self) -> Service:
        self.start_redis()
        (self.folder / "counters").mkdir(exist_ok=True)
        self.fatal_points.mkdir(exist_ok=True)
        os.environ |= self._environment()
        get_settings.cache_clear()
        self.redis = connect(self.redis_server.url)
        return self

    def start_redis(self) -> None:
        self.redis_server = SlowRedis.start(
            self.folder / "redis",
            port=_redis_port(),
            password=_redis_password(),
            admin_commands=True,  # for `roll_back_redis`, and for refusals
        )

    def __exit__(self, *_: object) -> None:
        self.end_workers()
        self._starter.shutdown()
        self.redis.close()
        self.redis_server.stop()

    def _environment(self) -> dict[str, str]:
        counting = "cellama.bench.harness.service:CountingStrategy"
        models = [{"batch_strategy": counting, **model} for model in self._models]
        own = {"CELLAMA_REDIS_URL": self.redis_server.url, "CELLAMA_MODELS": json.dumps(models)}
        own["CELLAMA_AUTO_TUNE_S"] = "0"  # a measurement would use the cores
        own |= {f"CELLAMA_{name.upper()}": value for name, value in self._settings.items()}
        return {**own, COUNTER_DIR: str(self.folder / "counters"), PACE_FILE: str(self._pace_file)}

    @property
    def _pace_file(self) -> Path:
        return self.folder / "pace"

    def slowed(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Slow down every step within a `with` block, so that work lasts long enough on a fast machine."""
        return slowed(self._pace_file, seconds) if seconds else contextlib.nullcontext()

    def start_worker(self, name: str | None = None, ahead_s: float = 0.0) -> str:
        """Start a worker with a new name or a stopped worker's name, and return the name.

        The worker's clock is `ahead_s` seconds ahead.
        """
        name = name or next(self._names)
        self._ahead_s.setdefault(name, ahead_s)
        self.processes[name] = self._starter.submit(self._start, name).result()
        self.num_starts += 1
        return name

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        ahead_s = self._ahead_s[name]
        environment = {
            **(environment_of(ahead_s, self.folder / "clock") if ahead_s else {}),
            **({fatal_points.DIRECTORY: str(self.fatal_points)} if self.dies_at_points else {}),
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                worker_argv(f"{name}@bench"),
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **environment},
                preexec_fn=die_with(os.getpid()),
            )

    def wait_ready(self) -> None:
        """Wait until every worker is in the registry.

        Raises RuntimeError with the end of the worker's log if a worker exits.
        """
        pids = {process.pid for process in self.processes.values()}

        def registered() -> bool:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} exited; the end of its log:\n{self.log(name)[-2000:]}")
            return pids <= {entry.pid for entry in live_workers(self.redis)}

        wait_until(registered, "workers in the registry")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def end_workers(self, signum: int = signal.SIGTERM) -> None:
        """Stop all workers and wait until they have exited."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signum)
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()

    def restart_redis(self, away_s: float = 0.5, load_delay_us: int = 0) -> None:
        """Restart Redis with the data that it has written to disk.

        The loading of each command is delayed by `load_delay_us` microseconds.
        """
        self.redis_server.stop()
        time.sleep(away_s)
        self.redis_server.load_delay_us = load_delay_us
        self._starter.submit(self.redis_server.run).result()
        self.redis_server.load_delay_us = 0

    def roll_back_redis(self, lost_s: float = 1.0) -> None:
        """Kill Redis and restart it without the writes of the last second."""
        self.redis.config_set("auto-aof-rewrite-percentage", 0)  # so that the file only grows meanwhile
        data = self.folder / "redis"
        [growing] = [*data.glob("appendonly.aof"), *data.glob("appendonlydir/*.incr.aof")]  # Redis 6, Redis 7
        kept = growing.stat().st_size
        time.sleep(lost_s)
        self.redis_server.process.kill()
        self.redis_server.process.wait()
        os.truncate(growing, kept)
        self._starter.submit(self.redis_server.run).result()

    def num_sampled(self) -> int:
        """Return the number of tokens sampled by all workers, including dead ones."""
        return num_sampled(self.folder / "counters")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    @contextlib.contextmanager
    def counting_results(self) -> Iterator[StoredStates]:
        """Collect the final states that Celery stores."""
        stored = StoredStates()
        pubsub = self.redis.pubsub()  # type: ignore[no-untyped-call]

        def note(message: dict[str, Any]) -> None:
            meta = json.loads(message["data"])
            if meta["status"] in ("SUCCESS", "FAILURE", "REVOKED"):
                stored.states.setdefault(meta["task_id"], []).append(meta["status"])

        pubsub.psubscribe(**{"celery-task-meta-*": note})
        thread = pubsub.run_in_thread(sleep_time=0.1, daemon=True, exception_handler=lambda *_: time.sleep(0.2))
        try:
            yield stored
        finally:
            time.sleep(0.5)  # the last ones are on their way
            thread.stop()
            thread.join(5)


@contextlib.contextmanager
def serving(
    model: Mapping[str, Any], *, workers: int = 1, settings: Mapping[str, str] | None = None
) -> Iterator[Service]:
    """Run a service with ready workers and one model, by default called "bench", in a temporary directory."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Service(Path(folder), [{"id": "bench", "default": True, **model}], **(settings or {})) as service,
    ):
        for _ in range(workers):
            service.start_worker()
        service.wait_ready()
        yield service
    os.environ.pop("CELLAMA_MODELS", None)


def cpu_s(pid: int) -> float:
    """Return the CPU time in seconds that a process, its threads and its running children have used."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def redis_cpu_s(redis: Any) -> float:
    """Return the CPU time that Redis has used, in seconds with microsecond resolution."""
    used = redis.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Poll until the condition returns a true value, and return this value. Raises RuntimeError after a timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise RuntimeError(f"still waiting after {timeout_s:g} s for: {what}")
