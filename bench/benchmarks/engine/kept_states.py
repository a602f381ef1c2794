"""Measure the benefit of KV states on disk, and their cost for other requests (docs/adr/014-kept-states.md).

`first` measures the time to the first token of a long prompt without a state, with a state in RAM, after an engine
restart, and in a second engine. `chats` runs four-turn conversations with and without a cache directory, and with
llama-server. RAM holds the states of only a tenth of the conversations. `gaps` measures the gaps between a stream's
tokens while 1 GB of states is written. `load` measures the throughput of requests without shared prefixes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cellama.bench.harness.engines import (
    CORES,
    GREEDY,
    loaded,
    loaded_each,
    model_path,
    percentile,
    random_prompts,
    run_all,
    submit_together,
    warm_up,
)
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LlamaServer, llama_server
from cellama.engine import Completion, Event, Handle, Model, Request, Text

MIB = 1 << 20
REST_S = 1.0  # between a load and the first request, as in a worker, which scans the directory and allocates memory
COLD, RAM, RESTART, SECOND = "cold", "from RAM", "after a restart", "in a second engine"
UNCACHED = "after a restart, files not in the page cache"
FIRST_TARGETS = {
    f"{RESTART} over {COLD}": "<= 0.15",
    f"{RESTART} over {RAM}": "<= 1.5",
    f"{SECOND} over {COLD}": "<= 0.2",
}
CHAT_SLOTS = 4
FOLDER, RAM_ONLY, SERVER = "engine, RAM and disk", "engine, RAM only", "llama-server, RAM"
P50, P95 = "median ms", "p95 ms"
TAIL = 64  # tokens at the end of prompts that differ, so that each prompt has its own state
WARM_UP_TOKENS = 8
STREAM_TOKENS = 2048  # tokens of a slot in addition to the prompt; a round needs fewer
SAVE_S = 120.0
LONGEST, P99 = "longest gap beside saves over without", "p99 gap beside saves over without"
LOAD_SLOTS, LOAD_PROMPT, LOAD_NEW = 16, 256, 32
RATE = "rate without sharing, folder over none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompt", type=int, default=1900, help="number of tokens per long prompt")
    parser.add_argument("--samples", type=int, default=3, help="number of long prompts per tier")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--in-ram", type=int, default=20, help="number of conversations whose states fit into RAM")
    parser.add_argument(
        "--opening", type=int, default=160, help="number of tokens in the first prompt of a conversation"
    )
    parser.add_argument("--message", type=int, default=32, help="number of tokens in each message after the first")
    parser.add_argument("--new", type=int, default=4, help="number of tokens per answer")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rate", type=float, default=6.0, help="number of turns that arrive per second")
    parser.add_argument(
        "--states",
        type=int,
        default=24,
        help="number of long prompts whose states are written while a stream is running",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of streaming before and after the writes")
    parser.add_argument("--requests", type=int, default=32, help="number of requests without shared prefixes")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds of the `gaps` and `load` parts")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path = model_path(args.model)
    parts = [PARTS[name](path, args) for name in args.parts]
    return Report(
        [row for part in parts for row in part.rows],
        {name: ratio for part in parts for name, ratio in part.ratios.items()},
        {name: target for part in parts for name, target in part.targets.items()},
        [caveat for part in parts for caveat in part.caveats],
    )


# The first token of a long prompt


def _first(path: Path, args: argparse.Namespace) -> Report:
    """Measure the median time to first token for each location of the prompts' states.

    All engines have only one slot, so the states of earlier prompts are in RAM or on disk.
    """
    prompts = random_prompts(args.samples, args.prompt, seed=args.seed)
    found: dict[str, list[Completion]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"n_parallel": 1, "ctx_per_slot": args.prompt + 64, "cache_dir": folder}
        with loaded_each(path, first=options, second=options) as models:
            found[COLD] = _ask_all(models["first"], prompts)
            found[RAM] = _ask_all(models["first"], prompts)
            models["first"].save_states()
            found[SECOND] = _ask_all(models["second"], prompts)
        with loaded(path, **options) as model:
            found[RESTART] = _ask_all(model, prompts)
        _forget_pages(Path(folder))
        with loaded(path, **options) as model:
            found[UNCACHED] = _ask_all(model, prompts)
    cold = [done.tokens for done in found[COLD]]
    texts_off = [way for way, each in found.items() if [done.tokens for done in each] != cold]
    if texts_off:
        raise RuntimeError(f"tokens differ from the cold run: {texts_off}")
    times = {way: median(map(_ttft_ms, each)) for way, each in found.items()}
    pairs = ((RESTART, COLD), (RESTART, RAM), (SECOND, COLD), (UNCACHED, COLD))
    return Report(
        [_first_row(way, each) for way, each in found.items()],
        {f"{one} over {other}": times[one] / times[other] for one, other in pairs},
        FIRST_TARGETS,
        [f"First tokens of prompts with {args.prompt} random tokens, sent one at a time, after a pause of 1 s."],
    )


def _ask_all(model: Model, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Send all requests one after another."""
    warm_up(model)
    time.sleep(REST_S)
    return [_ask(model, "asked", prompt, 1) for prompt in prompts]


def _ask(model: Model, name: str, prompt: Sequence[int], num_new: int) -> Completion:
    return model.engine.submit(Request(name, tuple(prompt), GREEDY, max_tokens=num_new, ignore_eos=True)).result()


def _ttft_ms(done: Completion) -> float:
    return done.timings.ttft_ms or 0.0


def _first_row(way: str, each: Sequence[Completion]) -> dict[str, Any]:
    times = sorted(map(_ttft_ms, each))
    return {
        "first token": way,
        "median ms": median(times),
        "least ms": times[0],
        "most ms": times[-1],
        "cached tokens": min(done.usage.cached_tokens for done in each),
        "tier": ", ".join(sorted({done.usage.cache_tier or "none" for done in each})),
    }


def _forget_pages(folder: Path) -> None:
    """Remove the folder's state files from the system's page cache."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Conversations


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of one turn of a conversation."""

    ttft_ms: float
    tokens: Sequence[int]
    num_computed: int  # prompt tokens


Ask = Callable[[str, Sequence[int], int], Turn]  # conversation, prompt, new tokens


def _chats(path: Path, args: argparse.Namespace) -> Report:
    """Run conversations whose turns arrive at a steady rate: all first turns, then all second turns, and so on.

    Therefore, each turn needs the state that has been unused for the longest time. The RAM limit is the same for all
    variants.
    """
    size = args.opening + args.turns * (args.message + args.new) + 1
    ram_mib = -(-args.in_ram * _state_bytes(path, size) // MIB)
    rows = {way: _chat_row(way, *_talk(ask, args)) for way, ask in _ways(path, args, size, ram_mib)}
    ratios = {
        f"{column}: {other} over {FOLDER}": rows[other][column] / rows[FOLDER][column]
        for column in (P50, P95)
        for other in rows
        if other != FOLDER
    }
    caveats = [
        f"Chats: RAM for {args.in_ram} of {args.conversations} conversations ({ram_mib} MiB), {CHAT_SLOTS} slots, "
        f"{args.rate:g} turns per second, contexts of {args.opening} to {size} tokens."
    ]
    return Report(list(rows.values()), ratios, dict.fromkeys(ratios, ">= 1"), caveats)


def _state_bytes(path: Path, num_tokens: int) -> int:
    """Return the size in bytes of a state with `num_tokens` tokens."""
    with loaded(path, n_parallel=1, ctx_per_slot=num_tokens) as model:
        run_all(model, random_prompts(1, num_tokens - 1), 1)
        return int(model.engine._core.scheduler.cache.memory.state_bytes(0))


def _ways(path: Path, args: argparse.Namespace, size: int, ram_mib: int) -> Iterator[tuple[str, Ask]]:
    """Yield each variant's name and a function that runs a turn, while the variant's engine or server is running."""
    for way in (FOLDER, RAM_ONLY):
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"n_parallel": CHAT_SLOTS, "ctx_per_slot": size, "cache_ram_bytes": ram_mib * MIB}
            with loaded(path, **options, cache_dir=folder if way == FOLDER else None) as model:
                warm_up(model)
                yield way, partial(_ask_engine, model)
    with llama_server(path, CHAT_SLOTS, size, CORES, "--cache-ram", str(ram_mib)) as server:
        if server:
            yield SERVER, partial(_ask_server, server)


def _ask_engine(model: Model, name: str, tokens: Sequence[int], num_new: int) -> Turn:
    done = _ask(model, name, tokens, num_new)
    return Turn(_ttft_ms(done), done.tokens, len(tokens) - done.usage.cached_tokens)


def _ask_server(server: LlamaServer, name: str, tokens: Sequence[int], num_new: int) -> Turn:
    reply = server.complete(tokens, num_new)
    return Turn(reply.ttft_s * 1e3, reply.tokens, reply.num_computed)


def _talk(ask: Ask, args: argparse.Namespace) -> tuple[list[Turn], float]:
    """Run all turns, and return their results and the elapsed seconds.

    Each turn waits for the conversation's previous turn to finish.
    """
    contexts = random_prompts(args.conversations, args.opening, seed=args.seed)
    messages = random_prompts(args.conversations * args.turns, args.message, seed=args.seed + 1)
    locks = [threading.Lock() for _ in contexts]
    started = time.monotonic()

    def turn(index: int) -> Turn:
        number = index % args.conversations
        with locks[number]:
            if index >= args.conversations:
                contexts[number] = [*contexts[number], *messages[index]]
            done = ask(str(number), contexts[number], args.new)
            contexts[number] = [*contexts[number], *done.tokens]
        return done

    with ThreadPoolExecutor(max_workers=64) as threads:
        futures = []
        for index in range(args.conversations * args.turns):
            time.sleep(max(0.0, started + index / args.rate - time.monotonic()))
            futures.append(threads.submit(turn, index))
        turns = [future.result() for future in futures]
    return turns, time.monotonic() - started


def _chat_row(way: str, turns: Sequence[Turn], seconds: float) -> dict[str, Any]:
    times = [turn.ttft_ms for turn in turns]
    return {
        "chats": way,
        P50: percentile(times, 0.5),
        P95: percentile(times, 0.95),
        "worst ms": max(times),
        "turns": len(turns),
        "computed tokens": sum(turn.num_computed for turn in turns),
        "seconds": seconds,
    }


# Gaps of a stream while states are written


class TimedStream:
    """A long streamed generation that records the time of each token."""

    def __init__(self, model: Model, prompt: list[int]) -> None:
        self.times: list[float] = []
        self._changed = threading.Condition()
        request = Request("stream", tuple(prompt), GREEDY, max_tokens=100_000, ignore_eos=True)
        self.handle = model.engine.submit(request, self._note)
        self.handle.add_done_callback(self._end)

    def _note(self, event: Event) -> None:
        if isinstance(event, Text):
            with self._changed:
                self.times.append(time.monotonic())
                self._changed.notify()

    def _end(self, _: Handle) -> None:
        with self._changed:
            self._changed.notify()

    def wait_for(self, count: int) -> None:
        """Wait until the request has generated `count` tokens or has finished."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.times) >= count or self.handle.done)

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """Return the gaps between tokens, in milliseconds, that overlap the period from `since` to `until`."""
        times = list(self.times)
        return [(b - a) * 1e3 for a, b in itertools.pairwise(times) if b > since and a < until]

    def gaps_alone_ms(self, seconds: float) -> list[float]:
        """Let the stream run alone for `seconds`, and return the gaps between its tokens in milliseconds."""
        started = time.monotonic()
        while time.monotonic() < started + seconds and not self.handle.done:
            self.wait_for(len(self.times) + 1)
        return self.gaps_ms(started, time.monotonic())


def _gaps(path: Path, args: argparse.Namespace) -> Report:
    """Measure the gaps between a stream's tokens while states are written to disk.

    The states are written from slots in the first round, and from RAM in later rounds.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = {"cache_dir": folder, "cache_ram_bytes": 8 << 30, "n_parallel": args.states + 2}
        with loaded(path, ctx_per_slot=args.prompt + STREAM_TOKENS, **options) as model:
            warm_up(model)
            for number in range(args.rounds):
                rows.append(_gaps_row(model, args, number))
                assert model.engine.store is not None
                written = model.engine.store.directory
                written.remove(file.path for file in written.states())
    return Report(
        rows,
        {
            LONGEST: median(row["longest ms"] / row["without: longest ms"] for row in rows),
            P99: median(row["p99 ms"] / row["without: p99 ms"] for row in rows),
        },
        {LONGEST: "<= 1.2", P99: "<= 1.2"},
        ["without: gaps of the same stream some seconds before and after, with the mean of the two longest gaps."],
    )


def _gaps_row(model: Model, args: argparse.Namespace, number: int) -> dict[str, Any]:
    stream = TimedStream(model, random_prompts(1, 32, seed=1000 + number)[0])
    stream.wait_for(WARM_UP_TOKENS)
    if number == 0:
        _fill(model, args)
    store, engine = model.engine.store, model.engine
    assert store is not None
    before = stream.gaps_alone_ms(args.seconds)
    written, drops, started = store.counters.written_bytes, store.counters.drops, time.monotonic()
    num_saved = engine.save_states(SAVE_S)
    ended = time.monotonic()
    beside = stream.gaps_ms(started, ended)
    after = stream.gaps_alone_ms(args.seconds)
    stream.handle.cancel()
    engine.wait_until_idle(SAVE_S)
    return {
        "states from": "RAM" if number else "slots",
        "written": num_saved,
        "MB": (store.counters.written_bytes - written) / 1e6,
        "dropped": store.counters.drops - drops,
        "seconds": ended - started,
        "longest ms": max(beside),
        "p99 ms": percentile(beside, 0.99),
        "median ms": median(beside),
        "without: longest ms": (max(before) + max(after)) / 2,
        "without: p99 ms": percentile(before + after, 0.99),
        "without: median ms": median(before + after),
    }


def _fill(model: Model, args: argparse.Namespace) -> None:
    """Fill idle slots with states that differ only in their last tokens and can therefore be computed quickly."""
    prompts = random_prompts(args.states, args.prompt, shared=args.prompt - TAIL, seed=args.seed)
    for part in (prompts[:1], prompts[1:]):
        requests = [Request(str(i), tuple(prompt), GREEDY, max_tokens=1) for i, prompt in enumerate(part)]
        for handle in submit_together(model, requests):
            handle.result()


# Throughput without shared prefixes


def _load(path: Path, args: argparse.Namespace) -> Report:
    """Measure the throughput without shared prefixes, alternating runs with and without a cache directory."""
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        prompts = random_prompts(args.requests, LOAD_PROMPT, seed=args.seed + 1 + number)
        ways = (True, False) if number % 2 else (False, True)
        rows += [_load_row(path, prompts, with_folder) for with_folder in ways]
    rates = {way: [row["tok/s"] for row in rows if row["load"] == way] for way in ("with a folder", "without")}
    return Report(
        rows,
        {RATE: median(rates["with a folder"]) / median(rates["without"])},
        {RATE: ">= 0.98"},
        [f"Load: {args.requests} interactive requests of {LOAD_PROMPT} + {LOAD_NEW} tokens, {LOAD_SLOTS} slots."],
    )


def _load_row(path: Path, prompts: list[list[int]], with_folder: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"cache_dir": folder} if with_folder else {}
        with loaded(path, n_parallel=LOAD_SLOTS, ctx_per_slot=LOAD_PROMPT + LOAD_NEW, **options) as model:
            warm_up(model)
            seconds, _ = run_all(model, prompts, LOAD_NEW)
            snapshot = model.engine.snapshot()
            return {
                "load": "with a folder" if with_folder else "without",
                "tok/s": len(prompts) * (LOAD_PROMPT + LOAD_NEW) / seconds,
                "states in RAM": snapshot.ram_saves,
                "files written": snapshot.disk_saves,
            }


PARTS: dict[str, Callable[[Path, argparse.Namespace], Report]] = {
    "first": _first,
    "chats": _chats,
    "gaps": _gaps,
    "load": _load,
}
