"""Jobs of a killed worker go on elsewhere: what is computed twice, with states on disk and without?

Real worker processes on a real Redis. The one that takes the jobs is killed when half of their tokens are sampled; a
second one goes on. Computed twice is what all steps of both have computed beyond each prompt and each new token once.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import CORES, model_path, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import COUNTING, PATIENCE_S, Service, wait_until
from cellama.tasks.contract.keys import job_key

LEASE_S = 3
TWICE = "computed twice, states on disk over none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=800)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--kill-at", type=float, default=0.5, help="of all new tokens sampled")
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    rows = [_row(kept, args) for kept in (True, False)]
    ratio = rows[0]["computed twice"] / max(1, rows[1]["computed twice"])
    return Report(rows, {TWICE: ratio}, {TWICE: "<= 0.25"})


def _row(kept: bool, args: argparse.Namespace) -> dict[str, Any]:
    model = {"id": "bench", "source": str(model_path(args.model)), "n_parallel": args.jobs, "default": True}
    model |= {"threads": args.threads, "capabilities": ["generate"], "ctx_per_slot": args.prompt + args.new + 8}
    model |= {"batch_strategy": COUNTING}  # no prompt is poison
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kept:
            model["cache_dir"] = str(folder / "states")
        with Service(folder, [model], lease_s=str(LEASE_S)) as service:
            first = service.start_worker()
            service.wait_ready()
            before = service.num_computed()
            return {"states": "on disk" if kept else "none"} | _crash(service, first, before, args)


def _crash(service: Service, first: str, before: int, args: argparse.Namespace) -> dict[str, Any]:
    from cellama.tasks import generate

    prompts = random_prompts(args.jobs, args.prompt, seed=args.seed)
    jobs = [generate.delay("bench", prompt, max_tokens=args.new, temperature=0, ignore_eos=True) for prompt in prompts]
    half = args.kill_at * args.jobs * args.new
    wait_until(lambda: service.num_sampled() >= half, "half of the tokens")
    service.kill(first)
    computed_before_kill = service.num_computed() - before
    service.start_worker()
    usages = [job.get(timeout=PATIENCE_S)["usage"] for job in jobs]
    if any(usage["completion_tokens"] != args.new for usage in usages):
        raise RuntimeError("a job has another number of tokens than asked for")
    attempts: list[Any] = [service.redis.hget(job_key(job.id), "attempt") for job in jobs]
    computed = service.num_computed() - before
    return {
        "jobs": args.jobs,
        "went on elsewhere": sum(int(attempt) > 1 for attempt in attempts),
        "computed by the first": computed_before_kill,
        "by the second": computed - computed_before_kill,
        "computed twice": computed - args.jobs * (args.prompt + args.new - 1),
        "restored": sum(usage["cached_tokens"] for usage in usages),
    }
