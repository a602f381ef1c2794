"""From a cancel to the end of the job's stream, for jobs that wait in Redis, wait in the worker, prefill and decode."""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from redis import Redis

from cellama.bench.harness.engines import CORES, model_path, random_prompts
from cellama.bench.harness.pace import STRATEGY
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, wait_until
from cellama.tasks.contract.keys import journal_key

LOOK_AHEAD = 2
TOO_FAST = (
    "a job ended before it could be cancelled: this machine is too fast for the model, make it slower with --pace"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the prompt of a job that is to prefill")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of it per step")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds per step at least: for fast machines")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    model = {"id": "bench", "source": str(model_path(args.model)), "n_parallel": args.slots, "default": True}
    model |= {"threads": args.threads, "capabilities": ["generate"], "ctx_per_slot": 2048, "chunk_size": args.chunk}
    model |= {"batch_strategy": STRATEGY, "cache_prompt": False}
    settings = {"look_ahead": str(LOOK_AHEAD)}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model], **settings) as service:
        service.start_worker()
        service.wait_ready()
        with service.slowed(args.pace):
            bench = _Cancels(service.redis, args)
            rows = [bench.measure(place) for place in ("decode", "prefill", "worker's line", "Redis")]
            bench.close()
    worst = max(row["worst ms"] - row["step ms"] for row in rows)
    ratios = {"worst time beyond one step, ms": worst, "events after the end": float(bench.num_after)}
    targets = {"worst time beyond one step, ms": "<= 50", "events after the end": "0"}
    return Report(rows, ratios, targets, ["A step is taken as the longest gap between two events of a job beside it."])


def _wait_for(sign: str, stream: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The next event of that type."""
    event = next((event for event in stream if event["type"] == sign), None)
    if event is None:
        raise RuntimeError(TOO_FAST)
    return event


class _Gaps:
    """Reads the stream of a job that runs beside, and keeps the longest time between two of its events."""

    def __init__(self, job: Any) -> None:
        self.longest_ms = 0.0
        self._stream = job.stream(timeout=600)
        _wait_for("token", self._stream)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        last = time.monotonic()
        for _ in self._stream:
            now = time.monotonic()
            self.longest_ms = max(self.longest_ms, (now - last) * 1e3)
            last = now

    def join(self) -> None:
        self._thread.join()


class _Cancels:
    """One client, and jobs that fill the worker as far as a place needs it."""

    def __init__(self, redis: Redis, args: argparse.Namespace) -> None:
        from cellama.api import Client

        self._args = args
        self._redis = redis
        self._client = Client()
        self._prompts = random_prompts(4 * args.samples + 40, args.prompt, seed=args.seed)
        self.num_after = 0  # events behind a terminal one

    def close(self) -> None:
        self._client.close()

    def measure(self, place: str) -> dict[str, Any]:
        slots = self._args.slots
        num_others = {"decode": 1, "prefill": 1, "worker's line": slots, "Redis": slots + LOOK_AHEAD}[place]
        others = [self._submit(32) for _ in range(num_others)]
        gaps = _Gaps(others[0])
        wait_until(lambda: self._num_started(others) >= min(num_others, slots), "jobs in their slots")
        times = [self._one(place) for _ in range(self._args.samples)]
        for job in others:
            job.cancel()
        gaps.join()
        wait_until(lambda: not self._client.stats()["slots_busy"], "an idle engine")
        return {"place": place, "median ms": median(times), "worst ms": max(times), "step ms": gaps.longest_ms}

    def _one(self, place: str) -> float:
        """Milliseconds from the cancel to the terminal event."""
        sign = {"decode": "token", "prefill": "started"}.get(place, "ping")
        job = self._submit(self._args.prompt if place == "prefill" else 32)
        stream = job.stream(ping=0.5, timeout=60)
        _wait_for(sign, stream)
        cancelled = time.monotonic()
        job.cancel()
        end = _wait_for("done", stream)
        if end["finish_reason"] != "cancelled":
            raise RuntimeError(TOO_FAST)
        milliseconds = (time.monotonic() - cancelled) * 1e3
        time.sleep(0.3)
        self.num_after += int(self._redis.xlen(journal_key(job.id))) - end["seq"] - 1
        return milliseconds

    def _num_started(self, jobs: Sequence[Any]) -> int:
        return int(self._redis.exists(*(journal_key(job.id) for job in jobs)))

    def _submit(self, length: int) -> Any:
        prompt = self._prompts.pop()[:length]
        return self._client.generate("bench", prompt, temperature=0, ignore_eos=True, max_tokens=1900 - length)
