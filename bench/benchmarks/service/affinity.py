"""Compare two workers that prefer jobs whose prefix they hold with two workers that take jobs in order.

The prompt families fit into the combined caches of both workers, but not into one worker's cache. The jobs wait in
Redis while the workers are suspended (SIGSTOP). The time is measured from the moment when the workers resume to the
last result. Rounds with and without affinity alternate, and each round has new prompts. A second kind of work consists
of jobs that share no prefixes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cellama.bench.harness.engines import model_path, random_prompts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, serving, wait_until
from cellama.bench.harness.workloads import families

FAMILIES, RANDOM = "families", "nothing shared"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=240, help="number of jobs per round")
    parser.add_argument("--families", type=int, default=40)
    parser.add_argument("--shared", type=int, default=512, help="number of tokens in each shared prefix")
    parser.add_argument("--own", type=int, default=16, help="number of additional prompt tokens per job")
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument(
        "--cache-ram",
        type=int,
        default=250,
        help="RAM quota for KV states per worker, in MB; the default holds about 20 shared prefixes",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> Report:
    found: dict[tuple[str, bool], list[Round]] = {}
    for number in range(args.rounds):
        for has_affinity in (False, True):
            with _workers(args, has_affinity) as service:
                for work in (FAMILIES, RANDOM):
                    found.setdefault((work, has_affinity), []).append(_measure(service, args, work, args.seed + number))
    rows = [
        {
            "work": work,
            "order": "affinity" if has_affinity else "in order",
            "tokens/s": median(each.tokens_per_s for each in rounds),
            "computed prompt tokens": median(each.computed for each in rounds),
        }
        for (work, has_affinity), rounds in found.items()
    ]
    rate = {key: median(each.tokens_per_s for each in rounds) for key, rounds in found.items()}
    ratios = {work: rate[work, True] / rate[work, False] for work in (FAMILIES, RANDOM)}
    caveats = ["The workers share this machine's cores.", "Tokens are those of prompts and of completions."]
    return Report(rows, ratios, {FAMILIES: ">= 1.4", RANDOM: ">= 0.98"}, caveats)


@dataclass(frozen=True, slots=True)
class Round:
    """A round's rate, and the share of prompt tokens that workers had to compute."""

    tokens_per_s: float
    computed: float


@contextlib.contextmanager
def _workers(args: argparse.Namespace, has_affinity: bool) -> Iterator[Service]:
    length = args.shared + args.own + args.new + 16
    model = {"source": str(model_path(args.model)), "n_parallel": args.slots, "threads": args.threads}
    model |= {
        "capabilities": ["generate"],
        "ctx_per_slot": -(-length // 256) * 256,
        "cache_ram_bytes": args.cache_ram << 20,
    }
    with serving(model, workers=args.workers, settings={"affinity": str(has_affinity).lower()}) as service:
        yield service


def _prompts(args: argparse.Namespace, work: str, seed: int) -> list[list[int]]:
    length = args.shared + args.own
    if work == RANDOM:
        return random_prompts(args.jobs // 3, length, seed=seed)
    lines = families(args.jobs, length, args.new, shared=args.shared, num_families=args.families, seed=seed)
    return [list(line.prompt) for line in lines]


def _measure(service: Service, args: argparse.Namespace, work: str, seed: int) -> Round:
    from cellama.api import Client

    prompts = _prompts(args, work, seed)
    pids = [process.pid for process in service.processes.values()]
    with Client() as client:
        _signal(pids, signal.SIGSTOP)
        try:
            jobs = client.generate_many("bench", prompts, max_tokens=args.new, temperature=0, ignore_eos=True)
            started = time.monotonic()
        finally:
            _signal(pids, signal.SIGCONT)
        keys = [f"celery-task-meta-{job.id}" for job in jobs]
        wait_until(lambda: service.redis.exists(*keys) == len(keys) and _are_done(service.redis, keys), "results")
        seconds = time.monotonic() - started
        usages = [job.result()["usage"] for job in jobs]
    num_prompt = sum(usage["prompt_tokens"] for usage in usages)
    num_computed = num_prompt - sum(usage["cached_tokens"] for usage in usages)
    num_new = sum(usage["completion_tokens"] for usage in usages)
    return Round((num_prompt + num_new) / seconds, num_computed / num_prompt)


def _signal(pids: Sequence[int], signum: int) -> None:
    for pid in pids:
        os.kill(pid, signum)


def _are_done(redis: Any, keys: Sequence[str]) -> bool:
    return all(b"SUCCESS" in value[:40] for value in redis.mget(keys) if value)
