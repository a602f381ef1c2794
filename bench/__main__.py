"""`python -m cellama.bench NAME`: runs one benchmark, prints a table and one JSON line."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

from cellama.bench.harness.report import show
from cellama.engine import EngineError
from cellama.engine.models.sources import resolve

from .harness import suite

ALL = "all"
ROOMS = {
    "engine": {
        "decode": "decode rate against llama-batched-bench, the limit",
        "uniform": "many requests of one length at once, against llama-server",
        "shared_prefix": "requests that share a prefix, against llama-server",
        "prefix_cache": "four-turn chats, more of them than slots: cache on against off",
        "strategies": "throughput and time to the first token under each batch strategy",
        "tokenize_overhead": "what tokenizing costs beside generating, for one caller and for many at once",
        "single_generate": "one request at a time: time to the first token, time per token",
        "server_concurrent": "growing numbers of callers at once: rate and latency",
        "python_time": "time outside llama.cpp per step, by slots, context length and requests that wait",
        "interactive": "an interactive request into an engine full of bulk work",
        "layouts": "unified against partitioned KV cache by number of slots; types of keys and values",
        "structured": "64 slots that write JSON by schemas against the same slots without; masks and compilation alone",
        "schemas": "texts sampled under the schemas of the JSON-Schema-Test-Suite: do they conform?",
        "adapters": "requests with different LoRA adapters on one engine, by the length of a turn",
    },
    "service": {
        "enqueue": "jobs into Redis: one by one, from threads, in bulk, and by plain Celery",
        "deep_queue": "100,000 waiting and a million delayed jobs: what a look of the reaper costs, and a purge",
        "queue_tax": "jobs through Celery and Redis against requests given to the engine",
        "small_jobs": "jobs that are next to nothing, beside no-ops of plain Celery",
        "urgent": "an urgent job while a worker is full of bulk jobs and more wait",
        "positions": "what is told of jobs that wait, against how long they really do",
        "cancel": "from a cancel to the end, wherever the job is",
        "gateway": "1,000 streams through a gateway, and what it adds to the first token; llama-server beside it",
        "telemetry": "throughput with metrics, and with traces of every job, over neither",
        "leaving": "clients of a gateway that all go away in mid-stream: when slots are free, what stays in Redis",
        "clients": "clients of other projects ask for structured output by 43 pydantic models and 20 Zod schemas",
        "readers": "many streams in one process: over shared connections, and with a connection each",
    },
    "load": {
        "holes": "decode steps while busy slots lie among idle ones, against as many side by side",
        "reading": "prompts read in one decode call, against one after another",
        "speculation": "guessed tokens on against off, by kind of work and number of streams, against llama-server",
        "mixed": "requests of mixed lengths, families and chats, against llama-server",
        "online": "Poisson arrivals, alone and beside a bulk load, against llama-server",
    },
    "faults": {
        "chaos": "workers killed or frozen, Redis restarted, rolled back or refusing, canvases: what is lost?",
        "chaos_sentinel": "the master of a Redis with sentinels killed, or its place handed over",
        "fuzz": "hostile and random payloads with good jobs beside them: who else feels them?",
        "responses": "background responses that are read while gateway, worker and Redis end: what readers got",
        "storm": "a bulk run whose command and workers are killed while Redis restarts",
        "batches": "OpenAI's batch script while the gateway that drives its batch is killed: every line once?",
    },
    "kept": {
        "kept_files": "files with KV states damaged in every way, and processes killed while they write",
        "kept_states": "KV states on disk: first tokens after a restart, of chats without room in RAM; what they cost",
        "kept_jobs": "jobs of a killed worker that go on elsewhere: tokens computed twice, with states on disk or not",
    },
    "models": {
        "loads": "two models loaded at once while a third streams: its longest gap",
        "embeddings": "1000 texts in one call or job against one text per call or job",
        "embed_beside": "gaps of a stream while another model embeds",
        "neighbours": "two workers on one machine, and one beside a busy program: their rates",
        "reuse": "prefixes that models with windows, recurrent and hybrid memory take over: cache on against off",
        "footprint": "memory of a model: planned before the load, logged by llama.cpp, resident",
    },
    "metrics": {
        "metrics_proof": "what a Prometheus has of two workers and a gateway under a mixed load, against its client",
    },
    "bulk": {
        "offline": "bulk runs from file to file, against llama-server and the naive Celery task",
        "bulk_lines": "memory and time that the command of a bulk run needs for many lines",
    },
}
NAMES = {name: text for benchmarks in ROOMS.values() for name, text in benchmarks.items()}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that peers and workers are ended
    parser = argparse.ArgumentParser(
        prog="cellama bench",
        description="Benchmarks of the engine, seeded, side by side with peers in one run.",
        epilog="\n".join(f"  {name:18} {text}" for name, text in (NAMES | {ALL: "every one in turn; --short"}).items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=[*sorted(NAMES), ALL], metavar="NAME", help="see below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="options of that benchmark; --help lists them")
    chosen = parser.parse_args()
    if chosen.name == ALL:
        raise SystemExit(1 if suite.run(list(NAMES), chosen.rest) else 0)
    benchmark = importlib.import_module(f".benchmarks.{_room_of(chosen.name)}.{chosen.name}", __package__)
    own = argparse.ArgumentParser(prog=f"cellama bench {chosen.name}", description=benchmark.__doc__)
    own.add_argument(
        "--model",
        type=_model,
        help="GGUF file, bundled://tiny, or padded: the bundled one at the cost of 160M parameters; "
        "default: 174M random weights, Q8_0; both are written once",
    )
    own.add_argument("--save", action="store_true", help="keep the JSON line under bench/results/")
    benchmark.add_arguments(own)
    args = own.parse_args(chosen.rest)
    workload = {name: value for name, value in vars(args).items() if name not in ("model", "save", "suite")}
    report = benchmark.run(args)
    show(
        chosen.name,
        {"model": args.model.name if args.model else getattr(benchmark, "MODEL", "synthetic 174M Q8_0"), **workload},
        report,
        save=args.save,
    )
    if report.wrong:
        raise SystemExit(1)


def _room_of(name: str) -> str:
    return next(room for room, benchmarks in ROOMS.items() if name in benchmarks)


def _model(source: str) -> Path:
    """The file of a source. Raises what argparse shows."""
    if source == "padded":
        from cellama.bench.harness.engines import padded_model

        return padded_model()
    try:
        return resolve(source)
    except EngineError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    main()
