"""Kill the commands and the workers of bulk runs repeatedly while Redis restarts, and count lost and repeated lines.

Each tenant has its own file and its own `cellama batch run`, which is a separate process. Real workers on a real Redis
run the bundled model with greedy sampling. Each text is compared with the text of an undisturbed run. Texts that differ
at a near tie are counted separately (reference_texts.py). Killed processes are restarted immediately.
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
    parser.add_argument("--lines", type=int, default=2000, help="total number of lines across all tenants")
    parser.add_argument("--tenants", type=int, default=1, help="number of tenants, each of which has its own bulk run")
    parser.add_argument("--new", type=int, default=64, help="number of tokens per line")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16, help="number of slots per worker")
    parser.add_argument(
        "--command-kills", type=int, default=3, help="number of times to kill the command of a random tenant"
    )
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
    """Executes all tenants' bulk runs on a service, with and without faults."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        self._service, self._folder, self._args = service, service.folder, args
        self._random = random.Random(args.seed)
        self._tenants = [f"tenant-{number:02d}" for number in range(args.tenants)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._results_at_start: dict[str, int] = {}  # by tenant, when its command started
        self._undisturbed: dict[str, ReferenceText] = {}
        self._order = list(range(args.lines))
        self._random.shuffle(self._order)

    def _write_lines(self, **params: Any) -> None:
        for number, tenant in enumerate(self._tenants):
            with self._source(tenant).open("w", encoding="utf-8") as lines:
                for i in self._order[number :: len(self._tenants)]:
                    prompt = f"Once upon a time, a little {ANIMALS[i % 6]} met {FRIENDS[i % 4]} and {i} others."
                    greedy = {"max_tokens": self._args.new, "temperature": 0, "ignore_eos": True, **params}
                    lines.write(json.dumps({"custom_id": f"line-{i}", "prompt": prompt, **greedy}) + "\n")

    def troubles(self) -> list[str]:
        """Return all faults in random order."""
        args = self._args
        found = ["command"] * args.command_kills + ["worker"] * args.worker_kills + ["redis"] * args.redis_restarts
        self._random.shuffle(found)
        return found

    def run_undisturbed(self) -> dict[str, Any]:
        """Process all tenants' files without faults, and save the generated texts and their near ties."""
        return self.run("undisturbed", [], logprobs=LOGPROBS)

    def run(self, name: str, troubles: list[str], **params: Any) -> dict[str, Any]:
        """Process all tenants' files, and inject a fault whenever a fixed number of lines has finished."""
        self._write_lines(**params)
        folder = self._folder / name
        folder.mkdir()
        sampled, started = self._service.num_sampled(), time.monotonic()
        for tenant in self._tenants:
            self._start(folder, tenant)
        for number, trouble in enumerate(troubles, start=1):
            self._wait_for(folder, number * self._args.lines // (len(troubles) + 1))
            getattr(self, f"_{trouble}")(folder)
            print(f"{name}: {trouble} ended, {self._num_results(folder)} lines done", file=sys.stderr, flush=True)
        codes = [process.wait(PATIENCE_S) for process in self._processes.values()]
        outputs = [self._output(folder, tenant) for tenant in self._tenants]
        results = [json.loads(text) for path in outputs for text in path.read_text(encoding="utf-8").splitlines()]
        errors = sum(_num_lines(path.with_name(f"{path.stem}.errors.jsonl")) for path in outputs)
        total = self._args.lines * self._args.new
        twice = 100 * (self._service.num_sampled() - sampled - total) / total
        row = {"run": name, "tenants": len(self._tenants), "troubles": len(troubles), "exit code": max(codes)}
        row |= {"seconds": time.monotonic() - started, "results": len(results), "errors": errors}
        return {**row, **self._compare(results), "twice %": twice}

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

    def _source(self, tenant: str) -> Path:
        return self._folder / f"{tenant}.jsonl"

    def _output(self, folder: Path, tenant: str) -> Path:
        return folder / f"{tenant}.jsonl"

    def _num_results(self, folder: Path) -> int:
        return sum(_num_lines(self._output(folder, tenant)) for tenant in self._tenants)

    def _start(self, folder: Path, tenant: str) -> None:
        output = self._output(folder, tenant)
        self._results_at_start[tenant] = _num_lines(output)
        argv = [*batch_command(self._source(tenant), output), "--fairness-key", tenant]
        with output.with_suffix(".log").open("ab") as log:
            self._processes[tenant] = subprocess.Popen(argv, stdout=log, stderr=log)

    def _wait_for(self, folder: Path, count: int) -> None:
        def there() -> bool:
            running = [process.poll() is None for process in self._processes.values()]  # before the results are counted
            if self._num_results(folder) >= count:
                return True
            if not any(running):
                logs = "".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
                raise RuntimeError(f"the commands ended too early:\n{logs[-4000:]}")
            return False

        wait_until(there, f"{count} results")

    # Disturbances

    def _command(self, folder: Path) -> None:
        """Kill a tenant's command that is still running, and restart the command."""
        running = [tenant for tenant, process in self._processes.items() if process.poll() is None]
        tenant = self._random.choice(running)
        self._processes[tenant].kill()
        self._processes[tenant].wait()
        self._start(folder, tenant)

    def _worker(self, _folder: Path) -> None:
        name = self._random.choice(sorted(self._service.processes))
        self._service.kill(name)
        self._service.start_worker(name)

    def _redis(self, folder: Path) -> None:
        """Restart Redis once every command is past its start, because a command doesn't start without Redis."""
        wait_until(lambda: all(self._is_past_start(folder, tenant) for tenant in self._tenants), "started commands")
        self._service.restart_redis()

    def _is_past_start(self, folder: Path, tenant: str) -> bool:
        has_ended = self._processes[tenant].poll() is not None
        return has_ended or _num_lines(self._output(folder, tenant)) > self._results_at_start[tenant]


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
