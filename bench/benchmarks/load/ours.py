"""Bulk runs with the engine alone, with one job per line, and with `cellama batch run`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from cellama.bench.harness.engines import loaded, run_all, warm_up
from cellama.bench.harness.service import Service, serving
from cellama.bench.harness.workloads import read_lines
from cellama.bench.peers.offline_peers import PATIENCE_S, TimedFile, timed, write_result

_BATCH = [sys.executable, "-c", "from cellama.api.cli import main; main()", "batch"]


def engine(model: Path, source: Path, target: Path, options: dict[str, Any]) -> TimedFile:
    """Run the lines in file order on the engine without a queue, as the baseline."""
    with loaded(model, **options) as ours:
        warm_up(ours)

        def run(out: IO[str]) -> None:
            lines = list(read_lines(source))
            prompts, lengths = [line.prompt for line in lines], [line.num_new for line in lines]
            _, done = run_all(ours, prompts, lengths, priority=9, stream=False)
            for line, completion in zip(lines, done, strict=True):
                usage = completion.usage
                computed = usage.prompt_tokens - usage.cached_tokens
                write_result(out, line.custom_id, completion.text, usage.completion_tokens, computed)

        return timed(source, target, run)


def jobs(model: Path, source: Path, target: Path, options: dict[str, Any]) -> TimedFile:
    """Run the lines in file order on a worker, with one Celery job per line."""

    def run(out: IO[str]) -> None:
        from cellama.tasks import GenerateParams, generate

        params: GenerateParams = {"temperature": 0, "ignore_eos": True, "priority": 9, "stream": False}
        lines = list(read_lines(source))
        calls: list[GenerateParams] = [{**params, "max_tokens": line.num_new} for line in lines]
        sent = [generate.delay("bench", list(line.prompt), **call) for line, call in zip(lines, calls, strict=True)]
        for line, job in zip(lines, sent, strict=True):
            _write_ours(out, line.custom_id, job.get(timeout=PATIENCE_S))

    with _worker(model, options):
        return timed(source, target, run)


def batch(model: Path, source: Path, target: Path, options: dict[str, Any]) -> TimedFile:
    """Run `cellama batch run` in a separate process with one worker."""

    def run(result: Path, out: IO[str]) -> None:
        done = subprocess.run(batch_command(source, result), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"`cellama batch run` exited with code {done.returncode}: {done.stderr[-2000:]}")
        for text in result.read_text(encoding="utf-8").splitlines():
            found = json.loads(text)
            _write_ours(out, found["id"], found)

    with _worker(model, options) as service:
        # The output of an earlier round would be continued.
        return timed(source, target, partial(run, service.folder / "batch.jsonl"))


def batch_command(source: Path, target: Path) -> list[str]:
    """Return the command for a bulk run. The environment contains the Redis URL."""
    return [*_BATCH, "run", str(source), "-o", str(target), "--model", "bench"]


def _write_ours(out: IO[str], custom_id: str, found: Mapping[str, Any]) -> None:
    usage = found["usage"]
    computed = usage["prompt_tokens"] - usage["cached_tokens"]
    write_result(out, custom_id, found["text"], usage["completion_tokens"], computed)


@contextlib.contextmanager
def _worker(path: Path, options: Mapping[str, Any]) -> Iterator[Service]:
    """Run a worker with one warm model."""
    model = {"source": str(path), "capabilities": ["generate"], "batch_strategy": "adaptive", **options}
    with serving(model) as service:
        from cellama.tasks import generate

        generate.delay("bench", list(range(300, 316)), max_tokens=4, temperature=0).get(timeout=300)
        yield service
