"""`cellama bench all`: every benchmark in turn, each in a process of its own; with --short in a few minutes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

# Options of a short form: enough to see that it works and about where we stand, not for figures to keep.
SHORT = {
    "decode": "--slots 1 16 --new 32 --rounds 1",
    "uniform": "--requests 16 --new 32 --slots 16 --best-slots 16 --server-slots 16",
    "mixed": "--requests 16 --scale 0.5 --slots 8 --server-slots 8 --arrivals 8 --shares 0.5",
    "shared_prefix": "--requests 16 --new 16 --slots 16 --best-slots 16",
    "prefix_cache": "--conversations 4 --slots 2 --turns 2 --system 128 --message 32 --new 8 --think 0.2",
    "strategies": "--requests 8 --slots 4 --scale 0.3",
    "tokenize_overhead": "--repeats 20",
    "single_generate": "--prompts 16 128 --new 32 --samples 1",
    "server_concurrent": "--callers 1 4 8 --slots 8 --new 16",
    "speculation": "--streams 1 4 --rounds 1 --new 48",
    "python_time": "--slots 1 8 --contexts 1024 4096 --new 16 --waiting 0 1000 --crowd-slots 32",
    "interactive": "--slots 8 --prompt 64 --samples 2",
    "queue_tax": "--slots 8 --requests 16 --new 32 --samples 3 --rounds 1",
    "small_jobs": "--jobs 100 --rounds 1 --slots 8",
    "urgent": "--slots 8 --bulk 24 --prompt 64 --new 100 --samples 2 --pause 0.5",
    "positions": "--jobs 60 --burst 20 --slots 2 --new 4 32 --prompt 16",
    "cancel": "--prompt 600 --chunk 64 --samples 1",
    "gateway": "--streams 100 --beside 20 --new 16 --slots 32 --rounds 1",
    "telemetry": "--jobs 32 --rounds 2",
    "metrics_proof": "--minutes 0.4",
    "clients": "--environments installed",
    "readers": "--streams 50 --rounds 1",
    "responses": "--responses 8 --new 60 --slots 8 --rounds 1",
    "chaos": "--scenarios kills poison ends --jobs 40 --new 100 --kills 2 --period 2 --ends 4 --chord 6",
    "chaos_sentinel": "--jobs 30 --new 200 --failovers 2 --period 2",
    "fuzz": "--payloads 200 --forms 85 --warm-up 0 --in-flight-corpus 4",
    "loads": "--rounds 1 --tokens 40",
    "embeddings": "--shape tiny --texts 100 --rounds 1",
    "embed_beside": "--texts 100",
    "neighbours": "--slots 4 --settle 3 --seconds 2 --rounds 1 --tries 2",
    "footprint": "--cases 2 --shapes 0",
    "reuse": "--requests 8 --new 4 --slots 4 --turns 2 --rounds 1",
    "layouts": "--slots 1 4 --prompt 300 --new 8",
    "holes": "--slots 16 --busy 4 8 --prompt 16 --steps 8 --rounds 1",
    "reading": "--slots 16 --length 32 --rounds 3",
    "structured": "--slots 8 --new 32 --rounds 1 --masks 2000 --schemas 20",
    "schemas": "--outputs 2",
    "adapters": "--slots 4 --turns 0 0.1 --prompt 32 --new 8",
    "enqueue": "--jobs 500 --rounds 1",
    "deep_queue": "--jobs 2000 --delayed 20000 --due 1000",
    "offline": "--lines 16 --new 16 --families 4 --slots 8 --server-slots 8 --try-lines 4 --naive-lines 4",
    "kept_states": "--samples 2 --prompt 600 --conversations 20 --in-ram 2 --opening 96 --turns 2 --rate 8 --states 4 "
    "--seconds 1 --requests 16 --rounds 1",
    "kept_jobs": "--jobs 4 --prompt 200 --new 60",
    "kept_files": "--damaged 500 --kills 3",
    "storm": "--lines 120 --command-kills 1 --worker-kills 1",
    "batches": "--lines 300 --lease 5 --pace 0.05",
    "leaving": "--clients 60 --slots 16 --rounds 1",
    "bulk_lines": "--lines 200 2000",
    "online": "--rates 1 --requests 8 --slots 8 --server-bulk 4 --new 32",
}


def run(names: Sequence[str], arguments: Sequence[str]) -> int:
    """Runs the named benchmarks and prints how each went; the number of those that failed."""
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
        own = SHORT[name].split() if args.short else []
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
