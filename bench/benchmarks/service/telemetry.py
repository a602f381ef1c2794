"""What metrics and traces of every job cost: throughput through the queue with neither, with metrics, and with both.

Three workers with the same model under names of their own are up all the time. Rounds take turns in changing order;
each is compared with the one beside it that tells nothing. Prometheus is a scrape every 5 s, the collector a server
that reads what is exported and keeps nothing; who sends the jobs makes its spans, too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.engines import random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service
from cellama.config import get_settings

MODEL = "bundled://tiny"
OFF, METRICS, BOTH = "off", "metrics", "metrics and traces"
SCRAPE_S = 5.0
TARGETS = {f"throughput, {METRICS} over {OFF}": ">= 0.99", f"throughput, {BOTH} over {OFF}": ">= 0.97"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=128, help="of each way, per round")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12, help="the median of their ratios counts")
    parser.add_argument("--most-s", type=float, default=200.0, help="no round begins after so many seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    ports = {METRICS: free_port(), BOTH: free_port()}
    with (
        tempfile.TemporaryDirectory() as folder,
        _sink() as sink,
        Service(Path(folder), [_model(OFF, args)]) as service,
        _scraping(list(ports.values())),
    ):
        traced = {"CELLAMA_TRACES": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": sink}
        ways: dict[str, dict[str, str]] = {OFF: {}, METRICS: {}, BOTH: traced}
        for name, variables in ways.items():
            scraped = {"CELLAMA_METRICS_PORT": str(ports[name])} if name in ports else {}
            with _environment({"CELLAMA_MODELS": json.dumps([_model(name, args)]), **scraped, **variables}):
                service.start_worker()
        service.wait_ready()
        measured = _rounds(ways, args)
    os.environ.pop("CELLAMA_MODELS", None)
    rows = [
        {"way": name, "tok/s": args.jobs * args.new / median(found), "rounds": len(found)}
        for name, found in measured.items()
    ]
    ratios, spread = {}, []
    for name in (METRICS, BOTH):
        found = [off / own for off, own in zip(measured[OFF], measured[name], strict=True)]
        ratios[f"throughput, {name} over {OFF}"] = median(found)
        spread.append(f"{name}: {min(found):.3f} to {max(found):.3f} in {len(found)} rounds")
    return Report(rows, ratios, TARGETS, ["single rounds over those beside them: " + "; ".join(spread)])


def _model(name: str, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "id": _id(name),
        "source": str(args.model) if args.model else MODEL,
        "n_parallel": args.slots,
        "threads": args.threads,
        "ctx_per_slot": 256,
        "cache_prompt": False,
        "capabilities": ["generate"],
    }


def _id(way: str) -> str:
    return way.replace(" ", "-")


def _rounds(ways: Mapping[str, Mapping[str, str]], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round by way."""
    measured: dict[str, list[float]] = {name: [] for name in ways}
    orders = itertools.cycle(itertools.permutations(ways))
    for name in ways:  # connections, scripts, threads, templates
        _seconds(name, ways[name], random_prompts(2 * args.slots, args.prompt, seed=args.seed), args.new)
    ends_at = time.monotonic() + args.most_s
    for number, order in zip(range(1, args.rounds + 1), orders, strict=False):
        if time.monotonic() > ends_at:
            break
        prompts = random_prompts(args.jobs, args.prompt, seed=args.seed + number)
        for name in order:
            measured[name].append(_seconds(name, ways[name], prompts, args.new))
    return measured


def _seconds(way: str, variables: Mapping[str, str], prompts: list[list[int]], num_new: int) -> float:
    """From the first job that is sent to the last result."""
    from cellama.tasks import generate

    with _environment(variables):
        get_settings.cache_clear()
        started = time.monotonic()
        sent = [generate.delay(_id(way), p, temperature=0, ignore_eos=True, max_tokens=num_new) for p in prompts]
        for job in sent:
            job.get(timeout=600)
        seconds = time.monotonic() - started
    get_settings.cache_clear()
    return seconds


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class _Sink(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def _sink() -> Iterator[str]:
    """The URL of a collector that keeps nothing."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def _scraping(ports: list[int]) -> Iterator[None]:
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(SCRAPE_S):
            for port in ports:
                with contextlib.suppress(OSError):  # a worker that begins, or ends
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_S).read()

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()
