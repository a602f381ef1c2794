"""Jobs at once against the same jobs one after another, through a real worker.

    python -m cellama.bench.benchmarks.service.concurrency            32 jobs on one worker with 16 slots

Prints a table and one JSON line. The model is the bundled one padded to the cost of 160M parameters (see padded.py):
as it is, it fits into the CPU's cache, and a batch gains little. Worker, Redis and producer share this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cellama.api.cli.services import wait_for_worker
from cellama.api.machine.redis_server import RedisServer
from cellama.api.machine.supervisor import Supervisor, worker_child
from cellama.bench.models.padded import write_padded

PATIENCE_S = 120.0
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")


def prompts(count: int) -> list[str]:
    """Prompts of different lengths."""
    story = "Once upon a time, there was a little fox. "
    return [story * (i % 5) + f"Once upon a time, there was a little {ANIMALS[i % 6]}" for i in range(count)]


def measure(count: int, max_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways (the best of `rounds`), and whether every text is the same."""
    from cellama.tasks import GenerateParams, generate

    params: GenerateParams = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    generate.delay("tiny", "warm up", **params).get(timeout=PATIENCE_S)
    serial_s, at_once_s, equal = [], [], True
    for _ in range(rounds):
        started = time.monotonic()
        alone = [generate.delay("tiny", p, **params).get(timeout=PATIENCE_S)["text"] for p in prompts(count)]
        serial_s.append(time.monotonic() - started)
        started = time.monotonic()
        jobs = [generate.delay("tiny", p, **params) for p in prompts(count)]
        together = [job.get(timeout=PATIENCE_S)["text"] for job in jobs]
        at_once_s.append(time.monotonic() - started)
        equal &= alone == together
    return {"serial_s": min(serial_s), "at_once_s": min(at_once_s), "texts_equal": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=160.0, help="pad the bundled model to so many million")
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RedisServer.start(Path(folder) / "redis") as redis:
        source = Path(folder) / "padded.gguf"
        write_padded(source, args.params)
        model = {"id": "tiny", "source": str(source), "n_parallel": args.slots, "threads": args.threads}
        os.environ |= {"CELLAMA_REDIS_URL": redis.url, "CELLAMA_MODELS": json.dumps([model])}
        worker = Supervisor([worker_child(log_path=Path(folder) / "worker.log")])
        worker.start()
        try:
            wait_for_worker(redis.url, worker.children[0])
            found = measure(args.jobs, args.max_tokens, args.rounds)
        finally:
            worker.stop()
    report(vars(args), found)


def report(workload: dict[str, Any], found: dict[str, Any]) -> None:
    ratio = found["serial_s"] / found["at_once_s"]
    print(f"{'one after another':20} {found['serial_s']:8.2f} s")
    print(f"{'at once':20} {found['at_once_s']:8.2f} s   {ratio:.2f} × faster, texts equal: {found['texts_equal']}")
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    line = {"bench": "concurrency", **workload, **found, "ratio": round(ratio, 2)}
    print(json.dumps({**line, "machine": machine, "commit": git.stdout.strip()}), file=sys.stdout)


if __name__ == "__main__":
    main()
