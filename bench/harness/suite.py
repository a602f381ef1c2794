"""The list of all benchmarks, and `cellama bench all`: every one in turn, each in a process of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A module of `bench/benchmarks/`."""

    directory: str
    question: str
    short: str  # options of a small run: enough to see that it works and about where we stand, not for figures to keep


BENCHMARKS = {
    "server_concurrent": Benchmark(
        "load",
        "growing numbers of callers at once: rate and latency, against llama-server",
        "--callers 1 4 8 --slots 8 --new 16",
    ),
    "mixed": Benchmark(
        "load",
        "requests of mixed lengths, families and chats, at once and as arrivals, against llama-server",
        "--requests 16 --scale 0.5 --slots 8 --server-slots 8 --arrivals 8 --shares 0.5",
    ),
    "offline": Benchmark(
        "load",
        "bulk runs from file to file, against llama-server and the naive Celery task",
        "--lines 16 --new 16 --families 4 --slots 8 --server-slots 8 --try-lines 4 --naive-lines 4",
    ),
    "gateway": Benchmark(
        "load",
        "1,000 streams through a gateway, and what it adds to the first token; llama-server beside it",
        "--streams 100 --beside 20 --new 16 --slots 32 --rounds 1",
    ),
    "decode": Benchmark(
        "engine",
        "decode rate against llama-batched-bench, the limit",
        "--slots 1 16 --new 32 --rounds 1",
    ),
    "prefix_cache": Benchmark(
        "engine",
        "four-turn chats, more of them than slots: cache on against off",
        "--conversations 4 --slots 2 --turns 2 --system 128 --message 32 --new 8 --think 0.2",
    ),
    "strategies": Benchmark(
        "engine",
        "throughput and time to the first token under each batch strategy",
        "--requests 8 --slots 4 --scale 0.3",
    ),
    "tokenize_overhead": Benchmark(
        "engine",
        "what tokenizing costs beside generating, for one caller and for many at once",
        "--repeats 20",
    ),
    "single_generate": Benchmark(
        "engine",
        "one request at a time: time to the first token, time per token",
        "--prompts 16 128 --new 32 --samples 1",
    ),
    "speculation": Benchmark(
        "engine",
        "guessed tokens on against off, by kind of work and number of streams, against llama-server",
        "--streams 1 4 --rounds 1 --new 48",
    ),
    "kept_states": Benchmark(
        "engine",
        "KV states on disk: first tokens after a restart, of chats without room in RAM; what they cost",
        "--samples 2 --prompt 600 --conversations 20 --in-ram 2 --opening 96 --turns 2 --rate 8 --states 4 "
        "--seconds 1 --requests 16 --rounds 1",
    ),
    "footprint": Benchmark(
        "engine",
        "memory of a model: planned before the load, logged by llama.cpp, resident",
        "--cases 2 --shapes 0",
    ),
    "enqueue": Benchmark(
        "service",
        "jobs into Redis: one by one, from threads, in bulk, and by plain Celery",
        "--jobs 500 --rounds 1",
    ),
    "small_jobs": Benchmark(
        "service",
        "jobs that are next to nothing, beside no-ops of plain Celery",
        "--jobs 100 --rounds 1 --slots 8",
    ),
    "urgent": Benchmark(
        "service",
        "an urgent job while a worker is full of bulk jobs and more wait",
        "--slots 8 --bulk 24 --prompt 64 --new 100 --samples 2 --pause 0.5",
    ),
    "positions": Benchmark(
        "service",
        "what is told of jobs that wait, against how long they really do",
        "--jobs 60 --burst 20 --slots 2 --new 4 32 --prompt 16",
    ),
    "chaos": Benchmark(
        "faults",
        "workers killed or frozen, Redis restarted, rolled back or refusing, canvases: what is lost?",
        "--scenarios kills poison ends --jobs 40 --new 100 --kills 2 --period 2 --ends 4 --chord 6",
    ),
    "storm": Benchmark(
        "faults",
        "a bulk run whose command and workers are killed while Redis restarts",
        "--lines 120 --command-kills 1 --worker-kills 1",
    ),
    "fuzz": Benchmark(
        "faults",
        "hostile and random payloads with good jobs beside them: who else feels them?",
        "--payloads 200 --forms 85 --warm-up 0 --in-flight-corpus 4",
    ),
    "structured": Benchmark(
        "structured",
        "64 slots that write JSON by schemas against the same slots without; masks and compilation alone",
        "--slots 8 --new 32 --rounds 1 --masks 2000 --schemas 20",
    ),
    "schemas": Benchmark(
        "structured",
        "texts sampled under the schemas of the JSON-Schema-Test-Suite: do they conform?",
        "--outputs 2",
    ),
    "clients": Benchmark(
        "structured",
        "clients of other projects ask for structured output by 43 pydantic models and 20 Zod schemas",
        "--environments installed",
    ),
}


def run(names: Sequence[str], arguments: Sequence[str]) -> int:
    """Run the named benchmarks and print how each went; return the number of those that failed."""
    parser = argparse.ArgumentParser(prog="cellama bench all", description=__doc__)
    parser.add_argument("--short", action="store_true", help="small forms, for a look at all of them")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--model", help="a GGUF file, bundled://tiny, or padded; default: that of each benchmark")
    parser.add_argument("--save", action="store_true", help="keep the JSON lines under bench/results/")
    parser.add_argument("--limit", type=float, help="seconds for each benchmark; default: 120 with --short, else none")
    args = parser.parse_args(arguments)
    shared = [*(["--model", args.model] if args.model else []), *(["--save"] if args.save else [])]
    ends: dict[str, tuple[str, float]] = {}
    for name in args.only:
        started = time.monotonic()
        own = BENCHMARKS[name].short.split() if args.short else []
        how = _run_one(name, [*shared, *own], args.limit or (120 if args.short else None))
        ends[name] = how, time.monotonic() - started
    print(f"\n{'benchmark':20} {'end':30} seconds")
    for name, (how, seconds) in ends.items():
        print(f"{name:20} {how:30} {seconds:.1f}")
    print(f"{'all':20} {'':30} {sum(seconds for _, seconds in ends.values()):.1f}")
    return sum(how != "ok" for how, _ in ends.values())


def _run_one(name: str, arguments: Sequence[str], limit_s: float | None) -> str:
    print(f"\n# {name} {' '.join(arguments)}", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "cellama.bench", name, *arguments])
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"ended after its {limit_s:g} s"
    finally:
        process.terminate()  # no more than a word to one that has ended; what it started ends with it
        process.wait()
    return "ok" if code == 0 else f"failed with {code}"
