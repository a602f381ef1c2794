"""Compare the rate of jobs while three pages of the console are open with the rate while the console is closed.

The pages are the overview, the list of jobs, and the page of a running job with its live output. They are requested as
often as their scripts request them in a browser. Rounds with and without pages alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any
from urllib.request import urlopen

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.engines import model_path, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving
from cellama.bench.peers.gateway_process import gateway

OVERVIEW_S = 3.0  # seconds between two requests of the overview (overview.html)
JOBS_S = 5.0  # seconds between two requests of the list of jobs (jobs.html)
KEPT = "rate with the console open / closed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=32, help="jobs of a round, all queued at its start")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens of a job")
    parser.add_argument("--new", type=int, default=128, help="tokens that a job generates")
    parser.add_argument("--rounds", type=int, default=8, help="number of rounds with the console, and without it")


class OpenConsole:
    """Requests the pages of the console until it is closed, and counts the answers."""

    def __init__(self, port: int, job_id: str) -> None:
        self.num_answers = 0
        self.num_events = 0
        self.errors: list[Exception] = []
        self._base = f"http://127.0.0.1:{port}/console"
        self._job_id = job_id
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(task,), daemon=True)
            for task in (self._overview, self._jobs, self._follow)
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
                    return


def run(args: argparse.Namespace) -> Report:
    model = {"source": str(model_path(args.model)), "n_parallel": args.slots, "capabilities": ["generate"]}
    port = free_port()
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    with serving(model), gateway(port):
        _round(args, contextlib.nullcontext)  # warm-up
        for number in range(args.rounds):
            for is_open in (False, True) if number % 2 else (True, False):
                row, errors = _measured(args, port, is_open=is_open)
                rows.append({"round": number, **row})
                wrong += errors
    closed, opened = ([row["tokens/s"] for row in rows if row["console"] == state] for state in ("closed", "open"))
    of_rounds = [after / before for before, after in zip(closed, opened, strict=True)]
    ratios = {
        KEPT: median(of_rounds),
        "lowest ratio of a round": min(of_rounds),
        "highest ratio of a round": max(of_rounds),
    }
    caveats = ["Client, console, gateway, worker and Redis share the cores, so this is an upper limit of the cost."]
    return Report(rows, ratios, {KEPT: ">= 0.99"}, caveats, wrong)


def _measured(args: argparse.Namespace, port: int, *, is_open: bool) -> tuple[dict[str, Any], list[str]]:
    consoles: list[OpenConsole] = []

    @contextlib.contextmanager
    def console(job_id: str) -> Iterator[None]:
        with OpenConsole(port, job_id) as opened:
            consoles.append(opened)
            yield

    rate = _round(args, console if is_open else contextlib.nullcontext)
    row = {
        "console": "open" if is_open else "closed",
        "tokens/s": rate,
        "answers": sum(opened.num_answers for opened in consoles),
        "events": sum(opened.num_events for opened in consoles),
    }
    return row, [f"the console failed: {error!r}" for opened in consoles for error in opened.errors]


def _round(args: argparse.Namespace, console: Callable[[str], contextlib.AbstractContextManager[Any]]) -> float:
    """Return the tokens per second of a round. The first job is the one that the console follows."""
    from cellama.tasks import generate

    prompts: Sequence[Any] = random_prompts(args.jobs, args.prompt)
    params: Any = {"max_tokens": args.new, "temperature": 0, "ignore_eos": True, "stream": True}
    started = time.monotonic()
    jobs = [generate.delay("bench", prompt, **params) for prompt in prompts]
    with console(jobs[0].id):
        for job in jobs:
            job.get(timeout=600)
        duration_s = time.monotonic() - started
    num_tokens: int = len(jobs) * args.new
    return num_tokens / duration_s
