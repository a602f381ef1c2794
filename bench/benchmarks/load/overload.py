"""Compare goodput at and beyond capacity with llama-server, for requests of three service tiers.

Requests arrive at a gateway with one worker as a Poisson process. A quarter has the tier `priority`, half `default`,
and a quarter `flex`. llama-server receives the same requests at the same times, and ignores the tiers. Capacity is the
rate at which llama-server completes these requests while all of its slots are busy, and the levels are multiples of it.

Goodput is the rate of requests that meet two limits. The first token must arrive within 4 times the idle time, and the
p95 gap between tokens must be within 2 times the idle gap. The idle times are those of the faster server. With draft
tokens, a step can produce several tokens at once. If tokens arrive together, the gap before them is divided among them.
The share of `priority` requests that meet the limits is also reported with undivided gaps. A client
gives up on a `priority` or `default` request without a first token after `--patience` seconds. A refused request is
sent once more, after the time in its `retry-after-ms` header. The repeated request doesn't count towards goodput.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.engines import CORES, FIRST_WORD, LAST_WORD, model_path, percentile
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving
from cellama.bench.harness.workloads import Line
from cellama.bench.peers.gateway_process import gateway
from cellama.bench.peers.http_client import Refused, complete, complete_openai
from cellama.bench.peers.programs import llama_server

from .arrivals import OURS, SERVER, StreamTimes

MODEL = "bench"
TIERS = {"priority": 0.25, "default": 0.5, "flex": 0.25}  # tiers and their shares of the requests
FIRST_FACTOR, GAP_FACTOR = 4.0, 2.0  # limits relative to an idle server
PROMPT_TOKENS, NEW_TOKENS = (32, 300), (48, 160)  # minimum and maximum
TYPICAL_PROMPT, TYPICAL_NEW, SPREAD = 80, 72, 0.5  # medians and sigma of the lognormal distributions
IDLE_PROMPTS = (32, 96, 256)  # lengths of the prompts with which an idle server is measured
IDLE_NEW, IDLE_SAMPLES = 32, 4
CAPACITY_S = 12.0  # seconds for which all slots are busy while capacity is measured
DRAIN_S = 120.0  # seconds after the last arrival after which requests count as incomplete
TOGETHER_MS = 3.0  # tokens with shorter gaps arrive together: a step takes longer
NEAR = 1.5  # a Retry-After is right if it differs from the actual time by at most this factor


@dataclass
class Outcome:
    """The outcome of one request. All times are in seconds."""

    tier: str
    at_s: float  # arrival, after the start of the level
    times: StreamTimes
    is_complete: bool = False
    is_abandoned: bool = False  # the client gave up
    retry_after_s: float | None = None  # set if the request was refused
    retried: Outcome | None = None


Send = Callable[[Outcome], Awaitable[None]]  # returns when the request is complete; raises Refused


@dataclass(frozen=True, slots=True)
class Idle:
    """The median time to first token of an idle server, by the number of prompt tokens, and its p95 gap."""

    first_ms: dict[int, float]
    gap_ms: float

    def first_of(self, num_prompt: int) -> float:
        """Return the time to first token for a prompt, interpolated between the measured lengths."""
        lengths = sorted(self.first_ms)
        high = next((length for length in lengths[1:] if length >= num_prompt), lengths[-1])
        low = lengths[lengths.index(high) - 1]
        slope = (self.first_ms[high] - self.first_ms[low]) / (high - low)
        return max(self.first_ms[lengths[0]], self.first_ms[low] + slope * (num_prompt - low))

    def faster(self, other: Idle) -> Idle:
        """Return the shorter of both servers' times."""
        first_ms = {length: min(ms, other.first_ms[length]) for length, ms in self.first_ms.items()}
        return Idle(first_ms, min(self.gap_ms, other.gap_ms))

    def is_prompt(self, times: StreamTimes) -> bool:
        """Return whether the first token arrived within the limit."""
        return times.ttft_ms <= FIRST_FACTOR * self.first_of(len(times.line.prompt))

    def is_fluent(self, gaps_ms: Sequence[float]) -> bool:
        """Return whether the gaps between tokens were within the limit."""
        return percentile(gaps_ms, 0.95) <= GAP_FACTOR * self.gap_ms

    def is_met(self, outcome: Outcome) -> bool:
        """Return whether a request was complete and within both limits."""
        return outcome.is_complete and self.is_prompt(outcome.times) and self.is_fluent(per_token(outcome.times))

    def is_met_undivided(self, outcome: Outcome) -> bool:
        """Return the same, but count the gap before tokens that arrive together as a single long gap."""
        return outcome.is_complete and self.is_prompt(outcome.times) and self.is_fluent(outcome.times.gaps_ms)


def per_token(times: StreamTimes) -> list[float]:
    """Return the gaps before the tokens in milliseconds. A gap before several tokens is divided among these tokens."""
    bursts: list[list[float]] = []
    for gap_ms in times.gaps_ms:
        if bursts and gap_ms < TOGETHER_MS:
            bursts[-1].append(gap_ms)
        else:
            bursts.append([gap_ms])
    return [sum(burst) / len(burst) for burst in bursts for _ in burst]


@dataclass
class Level:
    """The outcomes of all requests of one server at one multiple of capacity."""

    who: str
    level: float
    seconds: float
    outcomes: list[Outcome] = field(default_factory=list)

    def of(self, *tiers: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.tier in tiers]

    def goodput(self, idle: Idle, *tiers: str) -> float:
        """Return the requests per second that were complete and within the limits."""
        return sum(idle.is_met(outcome) for outcome in self.of(*tiers)) / self.seconds

    def row(self, idle: Idle, tier: str) -> dict[str, Any]:
        found = self.of(tier)
        done = [outcome for outcome in found if outcome.is_complete]
        firsts = [outcome.times.ttft_ms for outcome in done]
        gaps = [percentile(per_token(outcome.times), 0.95) for outcome in done]
        return {
            "level": self.level,
            "who": self.who,
            "tier": tier,
            "offered": len(found),
            "refused": sum(outcome.retry_after_s is not None for outcome in found),
            "gave up": sum(outcome.is_abandoned for outcome in found),
            "complete": len(done),
            "first ok": sum(idle.is_prompt(outcome.times) for outcome in done),
            "gaps ok": sum(idle.is_fluent(per_token(outcome.times)) for outcome in done),
            "within": sum(idle.is_met(outcome) for outcome in found),
            "first p50 ms": percentile(firsts, 0.5) if firsts else 0.0,
            "first p95 ms": percentile(firsts, 0.95) if firsts else 0.0,
            "median p95 gap ms": median(gaps) if gaps else 0.0,
        }

    def retries(self) -> list[tuple[float, float]]:
        """Return the announced and the actual seconds until a request could be accepted, for each refused request.

        A request could be accepted at some time between the last refused and the first accepted attempt of the same
        tier after the refusal. Attempts include repeated requests. The actual time is the time in this range that is
        closest to the announced one. Refusals after which no request of this tier was accepted are omitted.
        """
        attempts = [*self.outcomes, *(each.retried for each in self.outcomes if each.retried is not None)]
        pairs = []
        for outcome in (each for each in self.outcomes if each.retry_after_s is not None):
            later = [each for each in attempts if each.tier == outcome.tier and each.at_s > outcome.at_s]
            accepted = [each.at_s for each in later if each.retry_after_s is None]
            if accepted:
                refused = [each.at_s for each in later if each.retry_after_s is not None and each.at_s < min(accepted)]
                least_s, most_s = max(refused, default=outcome.at_s) - outcome.at_s, min(accepted) - outcome.at_s
                announced_s = outcome.retry_after_s or 0.0
                pairs.append((announced_s, min(max(announced_s, least_s), most_s)))
        return pairs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--levels", type=float, nargs="+", default=[0.5, 1.0, 1.5, 2.0], help="multiples of capacity")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each level in seconds")
    parser.add_argument("--capacity", type=float, help="capacity in requests per second (default: measured)")
    parser.add_argument("--slots", type=int, default=4, help="number of slots of the worker (default: 4)")
    parser.add_argument("--server-slots", type=int, default=4, help="number of slots of llama-server (default: 4)")
    parser.add_argument("--threads", type=int, default=max(1, CORES - 1), help="number of threads of both servers")
    parser.add_argument("--max-wait", default="0.5", help="gateway_max_wait_s, in seconds")
    parser.add_argument("--options", type=json.loads, default={}, help="further engine options of the worker, as JSON")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds until a client gives up")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    path, capacity, server_idle = model_path(args.model), args.capacity, None
    levels: list[Level] = []
    with llama_server(path, args.server_slots, PROMPT_TOKENS[1] + NEW_TOKENS[1], args.threads) as server:
        if server is not None:
            send = _to_server(server.port)
            server_idle = asyncio.run(_measure_idle(send))
            capacity = capacity or asyncio.run(_measure_capacity(send, 2 * args.server_slots, args.seed))
            levels += asyncio.run(_measure(SERVER, send, capacity, args))
    model = {"source": str(path), "n_parallel": args.slots, "threads": args.threads, "capabilities": ["generate"]}
    model |= {"ctx_per_slot": PROMPT_TOKENS[1] + NEW_TOKENS[1] + 1, "batch_strategy": "adaptive", **args.options}
    port = free_port()
    with serving(model), gateway(port, gateway_max_wait_s=args.max_wait):
        send = _to_gateway(port)
        idle = asyncio.run(_measure_idle(send))
        capacity = capacity or asyncio.run(_measure_capacity(send, 2 * args.slots, args.seed))
        levels += asyncio.run(_measure(OURS, send, capacity, args))
    limits = idle if server_idle is None else idle.faster(server_idle)
    rows = [level.row(limits, tier) for level in levels for tier in TIERS]
    ratios, targets = _ratios(levels, limits)
    ratios["capacity, requests per second"] = capacity
    ratios["idle first token ms, 96 prompt tokens"] = limits.first_of(96)
    ratios["idle gap ms, p95"] = limits.gap_ms
    caveats = [
        f"Clients, servers and Redis share {CORES} cores. The limits are those of the faster idle server.",
        "A refused or abandoned request and the repetition of a refused request don't count towards goodput.",
        "Whether a Retry-After was right is known only if other requests of the tier arrive at the right time.",
    ]
    return Report(rows, ratios, targets, caveats)


def _ratios(levels: Sequence[Level], idle: Idle) -> tuple[dict[str, float], dict[str, str]]:
    ratios: dict[str, float] = {}
    targets: dict[str, str] = {}
    for ours in (level for level in levels if level.who == OURS):
        name, mine = f"{ours.level:g} x", ours.goodput(idle, *TIERS)
        ratios[f"{name}: goodput per second"] = mine
        for theirs in (level for level in levels if level.who == SERVER and level.level == ours.level):
            good = theirs.goodput(idle, *TIERS)
            ratios[f"{name}: llama-server's goodput per second"] = good
            ratios[f"{name}: goodput over llama-server's"] = mine / max(good, 1 / theirs.seconds)
            targets[f"{name}: goodput over llama-server's"] = ">= 1.3"
        urgent, flex = ours.of("priority"), ours.of("flex")
        ratios[f"{name}: priority requests within the limits"] = mean(map(idle.is_met, urgent)) if urgent else 1.0
        targets[f"{name}: priority requests within the limits"] = ">= 0.95"
        undivided = mean(map(idle.is_met_undivided, urgent)) if urgent else 1.0
        ratios[f"{name}: priority requests within the limits, undivided gaps"] = undivided
        ratios[f"{name}: flex requests complete"] = mean(each.is_complete for each in flex) if flex else 1.0
        targets[f"{name}: flex requests complete"] = "1"
        again = [each.retried for each in ours.outcomes if each.retried is not None]
        if again:
            accepted = [each for each in again if each.retry_after_s is None]
            ratios[f"{name}: repeated requests that were accepted"] = len(accepted) / len(again)
        if pairs := ours.retries():
            near = [1 / NEAR <= announced / max(actual, 0.1) <= NEAR for announced, actual in pairs]
            ratios[f"{name}: Retry-After over the actual time, median"] = median(t / max(a, 0.1) for t, a in pairs)
            ratios[f"{name}: Retry-After within a factor of {NEAR}"] = mean(near)
    return ratios, targets


def _lines(seed: int, count: int) -> list[Line]:
    rng = random.Random(f"overload {seed}")

    def length(typical: int, bounds: tuple[int, int]) -> int:
        return min(max(bounds[0], round(typical * rng.lognormvariate(0.0, SPREAD))), bounds[1])

    def words(number: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_WORD, LAST_WORD) for _ in range(number))

    return [
        Line(f"line-{number}", words(length(TYPICAL_PROMPT, PROMPT_TOKENS)), length(TYPICAL_NEW, NEW_TOKENS))
        for number in range(count)
    ]


def _to_server(port: int) -> Send:
    async def send(outcome: Outcome) -> None:
        line = outcome.times.line
        await complete(port, line.prompt, line.num_new, outcome.times.note)

    return send


def _to_gateway(port: int) -> Send:
    async def send(outcome: Outcome) -> None:
        line = outcome.times.line
        params = {"ignore_eos": True, "service_tier": outcome.tier}
        await complete_openai(port, MODEL, list(line.prompt), line.num_new, outcome.times.note, **params)

    return send


async def _measure_idle(send: Send) -> Idle:
    """Send single requests to an idle server."""
    rng, firsts, gaps = random.Random("idle"), {}, []
    for length in IDLE_PROMPTS:
        found = []
        for _ in range(IDLE_SAMPLES):
            prompt = tuple(rng.randrange(FIRST_WORD, LAST_WORD) for _ in range(length))
            outcome = Outcome("priority", 0.0, StreamTimes(Line("idle", prompt, IDLE_NEW)))
            await send(outcome)
            found.append(outcome.times.ttft_ms)
            gaps += per_token(outcome.times)
        firsts[length] = median(found[1:])  # the first request of a server or a length may be slower
    return Idle(firsts, percentile(gaps, 0.95))


async def _measure_capacity(send: Send, num_callers: int, seed: int) -> float:
    """Return the rate at which requests complete while this number of them is always in flight."""
    lines, num_done, started = iter(_lines(seed + 1, 1000)), 0, time.monotonic()

    async def call() -> None:
        nonlocal num_done
        while True:
            await send(Outcome("flex", 0.0, StreamTimes(next(lines))))
            num_done += 1

    callers = [asyncio.create_task(call()) for _ in range(num_callers)]
    await asyncio.wait(callers, timeout=CAPACITY_S, return_when=asyncio.FIRST_EXCEPTION)
    rate = num_done / (time.monotonic() - started)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    return rate


async def _measure(who: str, send: Send, capacity: float, args: argparse.Namespace) -> list[Level]:
    found = []
    for number, level in enumerate(args.levels):
        found.append(await _arrive(who, send, level, capacity * level, args, args.seed + 10 * number))
        print(f"{who}, {level:g} x capacity: {len(found[-1].outcomes)} requests", flush=True)
    return found


async def _arrive(who: str, send: Send, level: float, rate: float, args: argparse.Namespace, seed: int) -> Level:
    """Send requests as a Poisson process for the duration of a level, and wait until they have ended."""
    rng = random.Random(f"arrivals {seed}")
    found, started, at_s = Level(who, level, args.seconds), time.monotonic(), 0.0
    lines = iter(_lines(seed, round(3 * rate * args.seconds) + 20))
    tasks = []
    while (at_s := at_s + rng.expovariate(rate)) < args.seconds:
        tier = rng.choices(list(TIERS), weights=list(TIERS.values()))[0]
        await asyncio.sleep(started + at_s - time.monotonic())
        found.outcomes.append(Outcome(tier, at_s, StreamTimes(next(lines))))
        tasks.append(asyncio.create_task(_converse(send, found.outcomes[-1], args.patience)))
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _converse(send: Send, outcome: Outcome, patience_s: float) -> None:
    """Send a request and, if it is refused, send it once more."""
    await _send(send, outcome, patience_s)
    if outcome.retry_after_s is not None:
        await asyncio.sleep(outcome.retry_after_s)
        times, at_s = StreamTimes(outcome.times.line), outcome.at_s + outcome.retry_after_s
        outcome.retried = replace(outcome, at_s=at_s, retry_after_s=None, times=times)
        await _send(send, outcome.retried, patience_s)


async def _send(send: Send, outcome: Outcome, patience_s: float) -> None:
    """Send a request. The client of an interactive request gives up if it receives no token in time."""
    sending = asyncio.ensure_future(send(outcome))
    try:
        if outcome.tier != "flex":
            await asyncio.wait([sending], timeout=patience_s)
            outcome.is_abandoned = not sending.done() and not outcome.times.pieces_s
        if outcome.is_abandoned:
            return
        await sending
        outcome.is_complete = True
    except Refused as error:
        if error.status != 429 or error.retry_after_s is None:
            raise
        outcome.retry_after_s = error.retry_after_s
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
