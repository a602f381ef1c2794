"""Repeatedly kill a bulk run's command and workers while Redis restarts, and count lost and repeated lines.

`cellama batch run` runs as a separate process, and real workers on a real Redis run the bundled model greedily. Each
text is compared with the text of an undisturbed run. Texts that differ at a near tie are counted separately
(reference_texts.py). Killed processes are restarted immediately.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cellama.bench.benchmarks.load.ours import batch_command
from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, reference_texts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import PATIENCE_S, Service, serving, wait_until

MODEL = "bundled tiny"
SOURCE = "bundled://tiny"
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
FRIENDS = ("Mia", "Tom", "Ben", "Lily")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--new", type=int, default=64, help="number of tokens per line")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16, help="number of slots per worker")
    parser.add_argument("--command-kills", type=int, default=3)
    parser.add_argument("--worker-kills", type=int, default=10)
    parser.add_argument("--redis-restarts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    model = {"source": SOURCE, "n_parallel": args.slots, "threads": 1}
    with serving(model, workers=args.workers) as service:
        storm = _Storm(service, args)
        rows = [storm.run_undisturbed(), storm.run("storm", storm.troubles())]
    ratios = {"% of tokens generated twice": rows[1]["twice %"], "lines lost, doubled or other": rows[1]["wrong"]}
    targets = {"% of tokens generated twice": "<= 1", "lines lost, doubled or other": "0"}
    return Report(
        rows, ratios, targets, ["The workers share the cores with Redis and the command, so times are not meaningful."]
    )


class _Storm:
    """Runs a file of lines on a service, with and without disturbances."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        self._service, self._folder, self._args = service, service.folder, args
        self._random = random.Random(args.seed)
        self._source = service.folder / "in.jsonl"
        self._process: subprocess.Popen[bytes]
        self._undisturbed: dict[str, ReferenceText] = {}
        self._order = list(range(args.lines))
        self._random.shuffle(self._order)

    def _write_lines(self, **params: Any) -> None:
        with self._source.open("w", encoding="utf-8") as lines:
            for i in self._order:
                prompt = f"Once upon a time, a little {ANIMALS[i % 6]} met {FRIENDS[i % 4]} and {i} others."
                greedy = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True, **params}
                lines.write(json.dumps({"custom_id": f"line-{i}", "prompt": prompt, **greedy}) + "\n")

    def troubles(self) -> list[str]:
        """Return all disturbances in random order."""
        args = self._args
        found = ["command"] * args.command_kills + ["worker"] * args.worker_kills + ["redis"] * args.redis_restarts
        self._random.shuffle(found)
        return found

    def run_undisturbed(self) -> dict[str, Any]:
        """Run the file without disturbances, and save its texts with their near ties."""
        return self.run("undisturbed", [], logprobs=LOGPROBS)

    def run(self, name: str, troubles: list[str], **params: Any) -> dict[str, Any]:
        """Run the file with disturbances at equal intervals of finished lines."""
        self._write_lines(**params)
        output, sampled, started = self._folder / f"{name}.jsonl", self._service.num_sampled(), time.monotonic()
        self._start(output)
        for number, trouble in enumerate(troubles, start=1):
            self._wait_for(output, number * self._args.lines // (len(troubles) + 1))
            getattr(self, f"_{trouble}")(output)
            print(f"{name}: {trouble} ended, {_num_lines(output)} lines done", file=sys.stderr, flush=True)
        code = self._process.wait(PATIENCE_S)
        results = [json.loads(text) for text in output.read_text(encoding="utf-8").splitlines()]
        errors = _num_lines(output.with_name(f"{name}.errors.jsonl"))
        total = self._args.lines * self._args.new
        twice = 100 * (self._service.num_sampled() - sampled - total) / total
        row = {"run": name, "troubles": len(troubles), "exit code": code, "seconds": time.monotonic() - started}
        row |= {"results": len(results), "errors": errors, **self._compare(results), "twice %": twice}
        return row

    def _compare(self, results: list[dict[str, Any]]) -> dict[str, int]:
        """Return the numbers of wrong and tied lines.

        Wrong lines are missing, repeated or different. Tied lines first differ at a near tie.
        """
        texts = {result["id"]: result["text"] for result in results}
        if not self._undisturbed:
            expected = zip(results, reference_texts(results, SOURCE), strict=True)
            self._undisturbed = {result["id"]: text for result, text in expected}
        counts = Counter(result["id"] for result in results)
        compared = {name: text.compare(texts.get(name, "")) for name, text in self._undisturbed.items()}
        names = {f"line-{i}" for i in self._order}
        return {
            "wrong": sum(counts[name] != 1 or compared.get(name) == "other" for name in names | texts.keys()),
            "tied": sum(kind == "tied" for kind in compared.values()),
        }

    def _start(self, output: Path) -> None:
        with output.with_suffix(".log").open("ab") as log:
            self._process = subprocess.Popen(batch_command(self._source, output), stdout=log, stderr=log)

    def _wait_for(self, output: Path, count: int) -> None:
        def there() -> bool:
            has_ended = self._process.poll() is not None  # read first, so that its last writes count
            if _num_lines(output) >= count:
                return True
            if has_ended:
                raise RuntimeError(f"the command ended too early:\n{output.with_suffix('.log').read_text()[-2000:]}")
            return False

        wait_until(there, f"{count} results")

    # Disturbances

    def _command(self, output: Path) -> None:
        self._process.kill()
        self._process.wait()
        self._start(output)

    def _worker(self, _output: Path) -> None:
        name = self._random.choice(sorted(self._service.processes))
        self._service.kill(name)
        self._service.start_worker(name)

    def _redis(self, _output: Path) -> None:
        self._service.restart_redis()


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
