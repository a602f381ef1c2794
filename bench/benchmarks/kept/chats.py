"""Conversations of which RAM holds a tenth: the first tokens of all turns with a folder, without, at llama-server.

Turns come at a steady rate, the first ones of all conversations, then the second ones, so that a conversation's state
is the least recently used of all when it is needed. All have the same room in RAM. llama-server saves slots where its
client says so: here after each answer, and the client restores them before the next turn.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import (
    CORES,
    GREEDY,
    loaded,
    percentile,
    random_prompts,
    run_all,
    warm_up,
)
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LlamaServer, llama_server
from cellama.engine import Model, Request

SLOTS = 4
FOLDER, RAM_ONLY = "engine, RAM and disk", "engine, RAM only"
SERVER, SERVER_SAVES = "llama-server, RAM", "llama-server, RAM, slots saved"
P50, P95 = "median ms", "p95 ms"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn gave."""

    ttft_s: float  # from when it was asked
    tokens: Sequence[int]
    num_computed: int  # prompt tokens


Ask = Callable[[str, Sequence[int], int], Turn]  # conversation, prompt, new tokens


def measure(path: Path, args: argparse.Namespace) -> Report:
    """All ways, one after another."""
    size = args.opening + args.turns * (args.message + args.new) + 1
    ram_mib = -(-args.in_ram * state_bytes(path, size) // MIB)
    rows = [_row(way, *_talk(ask, args)) for way, ask in _ways(path, args, size, ram_mib)]
    medians = {row["chats"]: row for row in rows}
    ratios = {
        f"{column}: {other} over {FOLDER}": medians[other][column] / medians[FOLDER][column]
        for column in (P50, P95)
        for other in (RAM_ONLY, SERVER, SERVER_SAVES)
        if other in medians
    }
    caveats = [
        f"Chats: RAM for {args.in_ram} of {args.conversations} conversations ({ram_mib} MiB), {SLOTS} slots, "
        f"{args.rate:g} turns per second, contexts of {args.opening} to {size} tokens."
    ]
    return Report(rows, ratios, dict.fromkeys(ratios, ">= 1"), caveats)


def state_bytes(path: Path, num_tokens: int) -> int:
    """What the state of so many tokens takes."""
    with loaded(path, n_parallel=1, ctx_per_slot=num_tokens) as model:
        run_all(model, random_prompts(1, num_tokens - 1), 1)
        return int(model.engine._core.scheduler.cache.memory.state_bytes(0))


def _ways(path: Path, args: argparse.Namespace, size: int, ram_mib: int) -> Iterator[tuple[str, Ask]]:
    """Each is up while it is asked."""
    for way in (FOLDER, RAM_ONLY):
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"n_parallel": SLOTS, "ctx_per_slot": size, "cache_ram_bytes": ram_mib * MIB}
            with loaded(path, **options, cache_dir=folder if way == FOLDER else None) as model:
                warm_up(model)
                yield way, partial(_ask_engine, model)
    with tempfile.TemporaryDirectory() as folder:
        for way in (SERVER, SERVER_SAVES):
            own = ("--cache-ram", str(ram_mib), "--slot-save-path", folder)
            with llama_server(path, SLOTS, size, CORES, *own) as server:
                if server and way == SERVER:
                    yield way, partial(_ask_server, server)
                elif server:
                    yield way, SlotSaver(server).ask


def _ask_engine(model: Model, name: str, tokens: Sequence[int], num_new: int) -> Turn:
    request = Request(name, tuple(tokens), GREEDY, max_tokens=num_new, ignore_eos=True)
    done = model.engine.submit(request).result()
    return Turn((done.timings.ttft_ms or 0.0) / 1e3, done.tokens, len(tokens) - done.usage.cached_tokens)


def _ask_server(server: LlamaServer, name: str, tokens: Sequence[int], num_new: int) -> Turn:
    reply = server.complete(tokens, num_new)
    return Turn(reply.ttft_s, reply.tokens, reply.num_computed)


class SlotSaver:
    """A client that restores a conversation into a free slot before its turn, and saves the slot after it."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server
        self._free: queue.Queue[int] = queue.Queue()
        self._saved: set[str] = set()
        for slot in range(SLOTS):
            self._free.put(slot)

    def ask(self, name: str, tokens: Sequence[int], num_new: int) -> Turn:
        asked = time.monotonic()
        with self._slot() as slot:
            if name in self._saved:
                self._server.do_with_slot("restore", slot, name)
            before_s = time.monotonic() - asked
            reply = self._server.complete(tokens, num_new, slot=slot)
            self._server.do_with_slot("save", slot, name)
            self._saved.add(name)
        return Turn(before_s + reply.ttft_s, reply.tokens, reply.num_computed)

    @contextmanager
    def _slot(self) -> Iterator[int]:
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)


def _talk(ask: Ask, args: argparse.Namespace) -> tuple[list[Turn], float]:
    """All turns, and how long they took. A turn that comes before the last of its conversation has ended waits."""
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


def _row(way: str, turns: Sequence[Turn], seconds: float) -> dict[str, Any]:
    times = [turn.ttft_s * 1e3 for turn in turns]
    return {
        "chats": way,
        P50: percentile(times, 0.5),
        P95: percentile(times, 0.95),
        "worst ms": max(times),
        "turns": len(turns),
        "computed tokens": sum(turn.num_computed for turn in turns),
        "seconds": seconds,
    }
