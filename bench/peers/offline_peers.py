"""Run bulk work on the peers.

Each run reads prompts from JSONL lines, generates the completions, and writes one line per result.
All runs are timed from the start of reading to the end of writing. The server or worker is already warm.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cellama.bench.harness.workloads import Line, read_lines

from .http_client import complete
from .naive import naive_worker
from .programs import LlamaServer, batched_bench

PATIENCE_S = 24 * 3600.0
CONNECTIONS_PER_SLOT = 2  # so that the next line waits in the server when a slot falls free


@dataclass(frozen=True, slots=True)
class TimedFile:
    """The cost of a run. `num_computed` counts the prompt tokens that did not come from a cache."""

    num_lines: int
    seconds: float
    num_computed: int


def timed(source: Path, target: Path, run: Callable[[IO[str]], None]) -> TimedFile:
    """Call `run` with the open output file, and measure its duration.

    Raises RuntimeError if a result doesn't have the requested number of tokens, because the run would not be
    comparable.
    """
    wanted = {line.custom_id: line.num_new for line in read_lines(source)}
    started = time.monotonic()
    with target.open("w", encoding="utf-8") as out:
        run(out)
    seconds = time.monotonic() - started
    results = [json.loads(text) for text in target.read_text(encoding="utf-8").splitlines()]
    short = [result["custom_id"] for result in results if result["tokens"] != wanted[result["custom_id"]]]
    if short:
        raise RuntimeError(
            f"{len(short)} lines contain a different number of tokens than requested, for example {short[0]}"
        )
    return TimedFile(len(results), seconds, sum(result["computed"] for result in results))


def write_result(out: IO[str], custom_id: str, text: str, num_tokens: int, num_computed: int) -> None:
    """Write one result in the format that `timed` reads."""
    result = {"custom_id": custom_id, "text": text, "tokens": num_tokens, "computed": num_computed}
    out.write(json.dumps(result) + "\n")


def llama_server(
    program: Path,
    model: Path,
    source: Path,
    target: Path,
    slots: int,
    context: int,
    threads: int,
    at_once: int | None = None,
) -> TimedFile:
    """Run llama-server with `slots` slots of `context` tokens (0: its default) and an asynchronous client.

    The client keeps `at_once` lines in flight, by default twice the number of slots.
    """
    options = ["-np", str(slots), "-c", str(slots * context)] if slots else []
    with LlamaServer.start(program, model, "-t", str(threads), *options) as server:
        server.complete(range(300, 316), 4)
        limit = at_once or CONNECTIONS_PER_SLOT * (slots or 4)
        return timed(source, target, lambda out: asyncio.run(_ask_server(server.port, source, out, limit)))


async def _ask_server(port: int, source: Path, out: IO[str], num_connections: int) -> None:
    lines = read_lines(source)

    async def ask() -> None:
        for line in lines:  # shared by all
            reply = await complete(port, line.prompt, line.num_new)
            computed = int(reply["timings"]["prompt_n"])
            write_result(out, line.custom_id, reply["content"], reply["tokens_predicted"], computed)

    await asyncio.gather(*(ask() for _ in range(num_connections)))


def naive_celery(model: Path, source: Path, target: Path, processes: int, context: int, threads: int) -> TimedFile:
    """Run the naive task with one message per line and one `llama_cpp.Llama` per process.

    The threads are divided equally among the processes.
    """

    def run(out: IO[str]) -> None:
        lines = list(read_lines(source))
        for line, job in zip(lines, [submit(line.prompt, line.num_new) for line in lines], strict=True):
            found = job.get(timeout=PATIENCE_S)
            write_result(out, line.custom_id, found["text"], found["tokens"], found["computed"])

    with (
        tempfile.TemporaryDirectory() as folder,
        naive_worker(
            Path(folder), model, processes=processes, threads=max(1, threads // processes), context=context
        ) as submit,
    ):
        for job in [submit(list(range(300, 316)), 4) for _ in range(4 * processes)]:
            job.get(timeout=300)
        return timed(source, target, run)


def limit(program: Path, model: Path, lines: Sequence[Line], num_computed: int, slots: int, threads: int) -> TimedFile:
    """Estimate a run's time from the prefill and decode rates that llama-batched-bench reports."""
    length, num_new = len(lines[0].prompt), lines[0].num_new
    context = -(-(length + num_new) // 256) * 256 * slots
    options = ("-c", str(context), "-b", "2048", "-ub", "512", "-no-kvu", "-t", str(threads))
    found = batched_bench(program, model, slots, length, num_new, *options)
    seconds = num_computed / found["speed_pp"] + len(lines) * num_new / found["speed_tg"]
    return TimedFile(len(lines), float(seconds), num_computed)
