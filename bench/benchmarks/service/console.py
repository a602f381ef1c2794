"""Compare the job rate while three console pages are open with the rate while the console is closed.

The pages are the overview, the list of jobs, and the page of a running job with its live output. The benchmark requests
the pages as often as their scripts would request them in a browser. Rounds with and without pages alternate. Rates vary
by more than one percent between rounds. Therefore, the benchmark also measures the CPU time of the gateway and of
Redis, which depends little on other work on the machine. The cost of the console is the share of the machine's CPU time
that the gateway and Redis use while the pages are open, minus their share while the pages are closed.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from urllib.request import urlopen

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.engines import CORES, model_path, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, cpu_s, redis_cpu_s, serving
from cellama.bench.peers.gateway_process import gateway

OVERVIEW_S = 5.0  # seconds between two requests of the overview (overview.html)
JOBS_S = 5.0  # seconds between two requests of the list of jobs (jobs.html)
DETAILS_S = 5.0  # seconds between two requests of the details of a job that has not ended (job.js)
KEPT = "rate with the console open / closed"
KEPT_BY_CPU = "rate kept, from processor time"
KEPT_IF_STALLED = "rate kept, if every step waits for the gateway and Redis"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=32, help="number of jobs to queue at the start of each round")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="number of prompt tokens per job")
    parser.add_argument("--new", type=int, default=128, help="number of tokens to generate per job")
    parser.add_argument(
        "--rounds",
        type=int,
        default=8,
        help="number of rounds to run with the console open, and again with the console closed",
    )


CAVEATS = (
    "Client, console, gateway, worker and Redis share the cores, so the rates are an upper limit of the cost.",
    "Processor time omits the benchmark's own requests, which browsers send from other machines, and the worker, which "
    "does the same work in both cases.",
)


class OpenConsole:
    """Requests the console's pages until `close` is called, and counts the answers."""

    def __init__(self, port: int, job_id: str) -> None:
        self.num_answers = 0
        self.num_events = 0
        self.errors: list[Exception] = []
        self._base = f"http://127.0.0.1:{port}/console"
        self._job_id = job_id
        self._closed, self._job_ended = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(task,), daemon=True)
            for task in (self._overview, self._jobs, self._follow, self._details)
        ]

    def __enter__(self) -> OpenConsole:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except Exception as error:  # the benchmark reports it
            self.errors.append(error)

    def _get(self, path: str) -> None:
        with urlopen(self._base + path, timeout=60) as response:
            response.read()
        self.num_answers += 1

    def _overview(self) -> None:
        while not self._closed.is_set():
            self._get("/overview")
            self._closed.wait(OVERVIEW_S)

    def _jobs(self) -> None:
        self._get("/jobs")
        while not self._closed.is_set():
            self._get("/jobs/list")
            self._closed.wait(JOBS_S)

    def _follow(self) -> None:
        self._get(f"/jobs/{self._job_id}")
        with urlopen(f"{self._base}/jobs/{self._job_id}/events", timeout=60) as stream:
            for line in stream:
                self.num_events += line.startswith(b"data:")
                if self._closed.is_set():
                    break
        self._job_ended.set()

    def _details(self) -> None:
        while not self._job_ended.wait(DETAILS_S):
            self._get(f"/jobs/{self._job_id}/details")


@dataclass(frozen=True)
class ConsoleRound:
    """A round's tokens per second, and the CPU seconds that the gateway and Redis used per second."""

    rate: float
    gateway_share: float
    redis_share: float

    @property
    def share(self) -> float:
        return self.gateway_share + self.redis_share


def run(args: argparse.Namespace) -> Report:
    model = {"source": str(model_path(args.model)), "n_parallel": args.slots, "capabilities": ["generate"]}
    port = free_port()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    found: dict[bool, list[ConsoleRound]] = {False: [], True: []}
    with serving(model) as service, gateway(port) as process:
        measure = partial(_round, args, service, process.pid)
        measure(contextlib.nullcontext)  # warm-up
        for number in range(args.rounds):
            for is_open in (False, True) if number % 2 else (True, False):
                consoles: list[OpenConsole] = []
                one = measure(partial(_opened, port, consoles) if is_open else contextlib.nullcontext)
                found[is_open].append(one)
                rows.append({"round": number, **_row(one, consoles)})
                wrong += [f"the console failed: {error!r}" for console in consoles for error in console.errors]
    return Report(rows, _ratios(found[False], found[True]), {KEPT: ">= 0.99", KEPT_BY_CPU: ">= 0.99"}, CAVEATS, wrong)


@contextlib.contextmanager
def _opened(port: int, consoles: list[OpenConsole], job_id: str) -> Iterator[None]:
    with OpenConsole(port, job_id) as console:
        consoles.append(console)
        yield


def _row(one: ConsoleRound, consoles: Sequence[OpenConsole]) -> dict[str, Any]:
    return {
        "console": "open" if consoles else "closed",
        "tokens/s": one.rate,
        "gateway CPU ms/s": one.gateway_share * 1e3,
        "Redis CPU ms/s": one.redis_share * 1e3,
        "answers": sum(console.num_answers for console in consoles),
        "events": sum(console.num_events for console in consoles),
    }


def _ratios(closed: Sequence[ConsoleRound], opened: Sequence[ConsoleRound]) -> dict[str, float]:
    of_rounds = [after.rate / before.rate for before, after in zip(closed, opened, strict=True)]
    added = median(after.share - before.share for before, after in zip(closed, opened, strict=True))
    return {
        KEPT: median(of_rounds),
        "lowest ratio of a round": min(of_rounds),
        "highest ratio of a round": max(of_rounds),
        KEPT_BY_CPU: 1 - added / CORES,
        KEPT_IF_STALLED: 1 - added,
    }


def _round(
    args: argparse.Namespace,
    service: Service,
    gateway_pid: int,
    console: Callable[[str], contextlib.AbstractContextManager[Any]],
) -> ConsoleRound:
    """Measure a round. The console follows the round's first job."""
    from cellama.tasks import generate

    prompts: Sequence[Any] = random_prompts(args.jobs, args.prompt)
    params: Any = {"max_tokens": args.new, "temperature": 0, "ignore_eos": True, "stream": True}
    before = cpu_s(gateway_pid), redis_cpu_s(service.redis)
    started = time.monotonic()
    jobs = [generate.delay("bench", prompt, **params) for prompt in prompts]
    with console(jobs[0].id):
        for job in jobs:
            job.get(timeout=600)
        duration_s = time.monotonic() - started
    after = cpu_s(gateway_pid), redis_cpu_s(service.redis)
    num_tokens: int = len(jobs) * args.new
    shares = [(end - start) / duration_s for start, end in zip(before, after, strict=True)]
    return ConsoleRound(num_tokens / duration_s, *shares)
