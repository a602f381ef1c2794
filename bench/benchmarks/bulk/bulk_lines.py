"""What the command of a bulk run needs for many lines: its peak memory, and the time until the first line is done.

Lines of about 2 kB that share all but their ends, one new token each, on the bundled model: the command has as much to
read, sort, send and write as in a real run, and the worker little to compute.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service

from .offline_ours import batch_command

MODEL = "bundled tiny"
LOOK_S = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--bytes", type=int, default=1900, help="of a prompt, about")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    model = {"id": "bench", "source": "bundled://tiny", "n_parallel": 32, "threads": 1, "default": True}
    model |= {"ctx_per_slot": 1024, "capabilities": ["generate"], "batch_strategy": "adaptive"}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        service.start_worker()
        service.wait_ready()
        rows = [_measure(Path(folder), count, args) for count in args.lines]
    fewest, most = min(rows, key=lambda row: row["lines"]), max(rows, key=lambda row: row["lines"])
    ratios = {
        "peak MB more with the most lines": most["peak MB"] - fewest["peak MB"],
        "seconds to the first result of the most lines": most["first result s"],
    }
    targets = {"peak MB more with the most lines": "<= 50", "seconds to the first result of the most lines": "<= 60"}
    return Report(rows, ratios, targets, ["The worker runs beside the command, on the same cores."])


def _measure(folder: Path, count: int, args: argparse.Namespace) -> dict[str, Any]:
    source, target = folder / f"{count}.jsonl", folder / f"{count}.out.jsonl"
    _write(source, count, args)
    started = time.monotonic()
    with target.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(batch_command(source, target), stdout=log, stderr=log)
    first = 0.0
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        if not first and target.exists() and target.stat().st_size:
            first = time.monotonic() - started
        time.sleep(LOOK_S)
    process.returncode = os.waitstatus_to_exitcode(ended[1])  # so that Popen knows that it has been waited for
    results = target.read_bytes().count(b"\n")
    if process.returncode or results != count:
        log_end = target.with_suffix(".log").read_text()[-2000:]
        raise RuntimeError(f"{results} results for {count} lines, exit code {process.returncode}:\n{log_end}")
    seconds = time.monotonic() - started
    row = {"lines": count, "input MB": source.stat().st_size / 1e6, "peak MB": ended[2].ru_maxrss / 1024}
    return {**row, "first result s": first, "seconds": seconds, "lines/s": count / seconds}


def _write(path: Path, count: int, args: argparse.Namespace) -> None:
    head = "Once upon a time, there was a little fox. " * (args.bytes // 42)
    numbers = random.Random(args.seed).sample(range(count), count)
    with path.open("w", encoding="utf-8") as file:
        for number in numbers:
            body = {"prompt": f"{head}{number}", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
            file.write(json.dumps({"id": f"line-{number}", **body}) + "\n")
