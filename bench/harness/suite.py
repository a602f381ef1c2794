"""List all benchmarks, and run them one after another in separate processes (`cellama bench all`)."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple


class Benchmark(NamedTuple):
    """A benchmark in the list, with its directory, the question that it answers, and the options for its short run."""

    directory: str
    question: str
    short: str  # options of a short run, which shows that the benchmark works; its figures are not kept


BENCHMARKS = {
    "server_concurrent": Benchmark(
        "load",
        "rate and latency for growing numbers of callers, against llama-server",
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
        "1,000 streams through a gateway, and its added latency, against llama-server",
        "--streams 100 --beside 20 --new 16 --slots 32 --rounds 1",
    ),
    "overload": Benchmark(
        "load",
        "goodput per service tier at and beyond capacity, against llama-server",
        "--levels 1 --seconds 5 --slots 4 --capacity 2",
    ),
    "decode": Benchmark(
        "engine",
        "decode rate against llama-batched-bench, which is the limit",
        "--slots 1 16 --new 32 --rounds 1",
    ),
    "host_work": Benchmark(
        "engine",
        "time per decode step outside llama.cpp, with a 152k vocabulary and with one slot",
        "--slots 8 --new 8 --stream 32 --rounds 1",
    ),
    "prefix_cache": Benchmark(
        "engine",
        "four-turn chats, more than slots, with and without the cache",
        "--conversations 4 --slots 2 --turns 2 --system 128 --message 32 --new 8 --think 0.2",
    ),
    "strategies": Benchmark(
        "engine",
        "throughput and time to the first token under each batch strategy",
        "--requests 8 --slots 4 --scale 0.3",
    ),
    "tokenize_overhead": Benchmark(
        "engine",
        "cost of tokenizing alongside generation, for one and for many callers",
        "--repeats 20",
    ),
    "single_generate": Benchmark(
        "engine",
        "time to first token and time per token of single requests",
        "--prompts 16 128 --new 32 --samples 1",
    ),
    "speculation": Benchmark(
        "engine",
        "speculative decoding on and off, by kind of work and streams, against llama-server",
        "--streams 1 4 --rounds 1 --new 48",
    ),
    "kept_states": Benchmark(
        "engine",
        "KV states on disk: first tokens after a restart and without RAM, and their cost",
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
        "rate of queueing jobs: one by one, from threads, in bulk, and with plain Celery",
        "--jobs 500 --rounds 1",
    ),
    "shares": Benchmark(
        "service",
        "time to choose the next job of many tenants, and how evenly they are served",
        "--jobs 500 --tenants 10 --takes 100",
    ),
    "two_tenants": Benchmark(
        "service",
        "waits of a small tenant next to a tenant with 100 times as many jobs, against waits on its share alone",
        "--jobs 8 --times 10 --slots 2 --new 8",
    ),
    "fleet": Benchmark(
        "service",
        "simulated workers with the real scripts: shares against VTC's bound, and affinity against jobs in order",
        "--runs 20 --requests 100 --loads 1",
    ),
    "affinity": Benchmark(
        "service",
        "two workers that prefer jobs whose prefix they hold, against jobs in order",
        "--jobs 24 --families 4 --shared 64 --new 4 --cache-ram 32 --rounds 1",
    ),
    "small_jobs": Benchmark(
        "service",
        "very small jobs, against no-op tasks of plain Celery",
        "--jobs 100 --rounds 1 --slots 8",
    ),
    "embeddings": Benchmark(
        "service",
        "embeddings of MiniLM through the queue and from file to file, against fastembed and sentence-transformers",
        "--lengths 8 64 --tokens 512 --rounds 1 --libraries",
    ),
    "urgent": Benchmark(
        "service",
        "an urgent job while bulk jobs fill the worker and the queue",
        "--slots 8 --bulk 24 --prompt 64 --new 100 --samples 2 --pause 0.5",
    ),
    "on_demand": Benchmark(
        "service",
        "first tokens of many models that share the memory of a few, against llama-server's router mode",
        "--models 4 --room 2 --requests 12 --rate 4 --new 4",
    ),
    "console": Benchmark(
        "service",
        "the rate of jobs with the console open, against the console closed",
        "--jobs 8 --slots 8 --prompt 16 --new 32 --rounds 1",
    ),
    "positions": Benchmark(
        "service",
        "estimated against actual waits of jobs",
        "--jobs 60 --burst 20 --slots 2 --new 4 32 --prompt 16",
    ),
    "chaos": Benchmark(
        "faults",
        "jobs lost when workers are killed or frozen and Redis restarts, rolls back or refuses commands",
        "--scenarios kills poison ends --jobs 40 --new 100 --kills 2 --period 2 --ends 4 --chord 6",
    ),
    "storm": Benchmark(
        "faults",
        "a bulk run whose command and workers are killed while Redis restarts",
        "--lines 120 --command-kills 1 --worker-kills 1",
    ),
    "fuzz": Benchmark(
        "faults",
        "hostile and random payloads, and their effect on other jobs",
        "--payloads 200 --forms 85 --warm-up 0 --in-flight-corpus 4",
    ),
    "structured": Benchmark(
        "structured",
        "64 slots that generate JSON with and without schemas; masks and compilation alone",
        "--slots 8 --new 32 --rounds 1 --masks 2000 --schemas 20",
    ),
    "schemas": Benchmark(
        "structured",
        "validity of texts sampled under the schemas of the JSON-Schema-Test-Suite",
        "--outputs 2",
    ),
    "agentic_traces": Benchmark(
        "service",
        "tokens of each turn that are computed again in agentic sessions of AIPerf",
        "--sessions 1 --turns 6",
    ),
    "coding_agents": Benchmark(
        "service",
        "tokens of each turn that Claude Code and Codex CLI compute again, also after a worker was killed",
        "--agents codex",
    ),
    "clients": Benchmark(
        "structured",
        "structured output by 43 pydantic models and 20 Zod schemas through other clients",
        "--environments installed",
    ),
}


def run(names: Sequence[str], arguments: Sequence[str]) -> int:
    """Run the named benchmarks, print the outcome of each one, and return the number of failures."""
    parser = argparse.ArgumentParser(prog="cellama bench all", description=__doc__)
    parser.add_argument("--short", action="store_true", help="run each benchmark briefly as a smoke test")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="NAME")
    parser.add_argument("--model", help="GGUF file, bundled://tiny, or padded (default: depends on the benchmark)")
    parser.add_argument("--save", action="store_true", help="append each result to bench/results/ as a JSON line")
    parser.add_argument(
        "--limit",
        type=float,
        help="time limit per benchmark in seconds (default: 120 with --short, otherwise unlimited)",
    )
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
        return f"stopped after {limit_s:g} s"
    finally:
        process.terminate()  # has no effect on a finished process; its children stop with it
        process.wait()
    return "ok" if code == 0 else f"failed with {code}"
