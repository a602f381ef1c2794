"""Compare decoding with and without speculation, and with llama-server, for several types of work and stream counts."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cellama.bench.harness.engines import (
    CORES,
    Together,
    loaded,
    loaded_each,
    model_path,
    padded_model,
    run_together,
    warm_up,
)
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LLAMA_SERVER, LlamaServer, Reply, llama_server, program
from cellama.engine import Model, Request
from cellama.engine.bundled import TINY_PATH

from .predictable_work import COPIED, FORCED, NUM_NEW, TOLD, UNPREDICTABLE, WORKS, PredictableWork

CONTEXT = 1024
PARTS = (COPIED, FORCED, UNPREDICTABLE, TOLD)
OFF, ON = "off", "auto"
PEERS = {  # llama-server's draft methods, by kind of work
    COPIED: ("ngram-simple", "ngram-mod"),
    TOLD: ("draft-simple",),
}
TARGETS = {
    COPIED: {1: ">= 1.8", 4: ">= 1.4", 16: ">= 1.0", 64: ">= 0.99"},
    FORCED: {1: ">= 2.0"},
    UNPREDICTABLE: dict.fromkeys((1, 4, 16, 64), ">= 0.98"),
    TOLD: {1: ">= 2.0"},
}
BUSY_TARGET = ">= 1.5"  # for one stream of forced text
MOST_STREAMS = {FORCED: 16, TOLD: 4}  # with more streams, the run would take too long
CAVEATS = (
    "Rates count from the moment when each stream of a group has its first token. Both engines run in one process and "
    "alternate. Ratios are medians over the rounds. With one stream, three requests run one after another.",
    "copying, forced and stories use the padded model, which generates the texts of the bundled model at the cost of a "
    "larger one. In stories, the bundled model is also the draft model. unpredictable samples from random weights.",
    "same: the share of requests that generate the same tokens with and without speculation.",
)


class WorkRun(NamedTuple):
    """The tokens that one run generated, the rate, and the numbers of accepted and rejected draft tokens."""

    rate: float  # tokens per second
    tokens: list[tuple[int, ...]]
    num_accepted: int = 0
    num_rejected: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="workloads to measure")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64], choices=list(NUM_NEW))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy", action="store_true", help="keep one core busy with another process")
    parser.add_argument(
        "--server-streams",
        type=int,
        nargs="*",
        default=[1, 4, 16],
        help="numbers of concurrent streams to measure with llama-server",
    )
    parser.add_argument(
        "--new", type=int, default=None, help="number of tokens per request (default: depends on the workload)"
    )


def run(args: argparse.Namespace) -> Report:
    with busy_core() if args.busy else contextlib.nullcontext():
        return _run_parts(args)


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy with another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError("the process that keeps a core busy has exited early")
    finally:
        process.kill()
        process.wait()


def _run_parts(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    peers: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    targets: dict[str, str] = {}
    for name in args.parts:
        path = model_path(args.model) if name == UNPREDICTABLE else args.model or padded_model()
        for streams in (count for count in args.streams if count <= MOST_STREAMS.get(name, count)):
            row = _compare(path, name, streams, args)
            rows.append(row)
            key = f"{name}, {streams} streams: on over off"
            ratios[key] = row["on/off"]
            if streams in TARGETS[name] and not args.busy:
                targets[key] = TARGETS[name][streams]
            if (name, streams, args.busy) == (FORCED, 1, True):
                targets[key] = BUSY_TARGET
            for mode, rate in _server(path, name, streams, args).items():
                peers.append({"work": name, "streams": streams, "llama-server's --spec-type": mode, "t/s": rate})
                ratios[f"{name}, {streams} streams: ours over llama-server's, {mode}"] = row["on t/s"] / rate
    return Report([*rows, *peers], ratios, targets, CAVEATS)


def _compare(path: Path, name: str, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    options = {"n_parallel": streams, "ctx_per_slot": CONTEXT, "cache_ram_bytes": 0}
    sides = {mode: {**options, "speculation": mode} for mode in (OFF, ON)}
    if name == TOLD:
        sides[ON]["draft"] = str(TINY_PATH)
    runs: dict[str, list[WorkRun]] = {OFF: [], ON: []}
    with loaded_each(path, **sides) as models:
        for model in models.values():
            warm_up(model)
        work = _work(models[OFF], name, streams, args)
        for number in range(args.rounds):
            for mode in sorted(runs, reverse=number % 2 == 0):
                runs[mode].append(_run(models[mode], work, streams, f"{mode} {number}"))
    pairs = list(zip(runs[OFF], runs[ON], strict=True))
    same = [a == b for off, on in pairs for a, b in zip(off.tokens, on.tokens, strict=True)]
    accepted, rejected = (sum(getattr(on, count) for on in runs[ON]) for count in ("num_accepted", "num_rejected"))
    return {
        "work": name,
        "streams": streams,
        "off t/s": median(off.rate for off in runs[OFF]),
        "on t/s": median(on.rate for on in runs[ON]),
        "on/off": median(on.rate / off.rate for off, on in pairs),
        "rounds": " ".join(f"{on.rate / off.rate:.2f}" for off, on in pairs),
        "drafted/token": (accepted + rejected) / max(1, sum(len(tokens) for on in runs[ON] for tokens in on.tokens)),
        "accepted": accepted / max(1, accepted + rejected),
        "same": sum(same) / len(same),
    }


def _work(model: Model, name: str, streams: int, args: argparse.Namespace) -> PredictableWork:
    work = WORKS[name](model, max(3, streams), streams)
    return work._replace(num_new=args.new or work.num_new)


def _groups(work: PredictableWork, streams: int) -> Iterator[list[list[int]]]:
    """Yield groups of prompts to run concurrently. A group has one prompt per stream.

    A single stream gets three groups, which run one after another.
    """
    count = 3 * streams if streams == 1 else streams
    for at in range(0, count, streams):
        yield work.prompts[at : at + streams]


def _run(model: Model, work: PredictableWork, streams: int, scope: str) -> WorkRun:
    """Run the work in a separate cache scope, so that requests can't reuse prefixes cached by earlier runs."""
    groups: list[Together] = []
    for prompts in _groups(work, streams):
        params = {"max_tokens": work.num_new, "ignore_eos": True, **work.params, "cache_scope": scope}
        requests = [Request(str(at), tuple(prompt), **params) for at, prompt in enumerate(prompts)]
        groups.append(run_together(model, requests))
    return WorkRun(
        rate=sum(group.num_tokens for group in groups) / sum(group.seconds for group in groups),
        tokens=[completion.tokens for group in groups for completion in group.completions],
        num_accepted=sum(group.num_accepted for group in groups),
        num_rejected=sum(group.num_rejected for group in groups),
    )


def _server(path: Path, name: str, streams: int, args: argparse.Namespace) -> dict[str, float]:
    """Return llama-server's tokens per second without speculation and with each of its speculation methods."""
    if name not in PEERS or streams not in args.server_streams or not program(LLAMA_SERVER):
        return {}
    with loaded(path, n_parallel=1, ctx_per_slot=CONTEXT) as model:
        work = _work(model, name, streams, args)
    rates = {}
    for mode in ("none", *PEERS[name]):
        draft = ["-md", str(TINY_PATH)] if mode.startswith("draft") else []
        with llama_server(path, streams, CONTEXT, CORES, "--spec-type", mode, *draft) as peer:
            assert peer is not None
            rates[mode] = median([_ask(peer, work, streams) for _ in range(args.rounds)])
    return rates


def _ask(peer: LlamaServer, work: PredictableWork, streams: int) -> float:
    """Return llama-server's tokens per second after each stream's first token. Cached prefixes are not reused."""
    seconds, num_tokens = 0.0, 0.0
    for prompts in _groups(work, streams):
        with ThreadPoolExecutor(len(prompts)) as threads:
            timed = list(threads.map(lambda prompt: _timed(peer, prompt, work.num_new), prompts))
        began = max(asked + reply.ttft_s for asked, reply in timed)
        seconds += max(asked + reply.total_s for asked, reply in timed) - began
        num_tokens += sum(_share_after(asked, reply, began) for asked, reply in timed)
    return num_tokens / max(seconds, 1e-6)


def _timed(peer: LlamaServer, prompt: Sequence[int], num_new: int) -> tuple[float, Reply]:
    return time.monotonic(), peer.complete(prompt, num_new, cache_prompt=False)


def _share_after(asked: float, reply: Reply, began: float) -> float:
    """Estimate how many of a reply's tokens arrived after `began`.

    A piece of text may contain several tokens.
    """
    pieces = [asked + at > began for at in reply.pieces_s]
    return reply.num_tokens * sum(pieces) / max(1, len(pieces))
