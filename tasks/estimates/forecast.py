"""When a job gets a slot, played through again and again with what jobs like those before it took. Pure."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

NUM_DRAWS = 24
SPEED_SIGMA = 0.1  # how much faster or slower it goes from now on (of the logarithm)
HANDLING_S = 1.0  # what queue, worker and engine need beside it
UNKNOWN_FACTOR = 2.0  # how much wider the range is while no job of that kind has ended


@dataclass(frozen=True, slots=True)
class Server:
    """A worker for these jobs: so many at once, and how fast each may go; speed 1 for work in seconds."""

    num_slots: int
    speeds: Sequence[float]  # each as likely as the others


@dataclass(frozen=True, slots=True)
class Ahead:
    """A job that waits, before the one in question."""

    amounts: Sequence[float]  # how much work it may be, each as likely as the others
    pieces: int = 1  # that slots work on side by side


@dataclass(frozen=True, slots=True)
class Running:
    """A job that has slots of a server, for so long by now."""

    server: int
    elapsed_s: float
    amounts: Sequence[float]
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until a slot is free: the middle one of the draws, and the range that all of them span."""

    eta_s: float
    least_s: float
    most_s: float


def forecast(
    servers: Sequence[Server],
    running: Sequence[Running],
    ahead: Sequence[Ahead],
    rest: float = 0.0,
    *,
    is_learnt: bool = True,
    seed: int = 0,
) -> Forecast | None:
    """When the job behind all these gets a slot; `rest` is work before it beside that of the jobs in `ahead`.

    None if nothing is known of how fast it goes, and all slots are busy.
    """
    busy = [sum(job.pieces for job in running if job.server == number) for number in range(len(servers))]
    free = sum(max(0, server.num_slots - count) for server, count in zip(servers, busy, strict=True))
    if sum(job.pieces for job in ahead) < free and not rest:
        return Forecast(0.0, 0.0, HANDLING_S)
    amounts = [*(job.amounts for job in running), *(job.amounts for job in ahead)]
    if not all(server.speeds for server in servers) or not all(amounts):
        return None
    chance = random.Random(seed)
    found = sorted(_play(servers, running, ahead, rest, chance) for _ in range(NUM_DRAWS))
    wider = 1.0 if is_learnt else UNKNOWN_FACTOR
    central = found[NUM_DRAWS // 2]
    least, most = found[0] / wider, found[-1] * wider
    return Forecast(central, max(0.0, least - HANDLING_S), most + HANDLING_S)


def _play(
    servers: Sequence[Server],
    running: Sequence[Running],
    ahead: Sequence[Ahead],
    rest: float,
    chance: random.Random,
) -> float:
    """One way in which it may go: seconds until a slot is free."""
    factor = math.exp(chance.gauss(0.0, SPEED_SIGMA))
    speeds = [chance.choice(server.speeds) * factor for server in servers]
    left: list[list[float]] = [[] for _ in servers]
    for job in running:
        total, speed = _total(job, speeds[job.server], chance), speeds[job.server]
        left[job.server] += [max(0.0, total / job.pieces / speed - job.elapsed_s)] * job.pieces
    slots = [
        (free_at, number)
        for number, server in enumerate(servers)
        for free_at in sorted(left[number] + [0.0] * max(0, server.num_slots - len(left[number])))[-server.num_slots :]
    ]
    heapq.heapify(slots)
    for waiting in ahead:
        share = chance.choice(waiting.amounts) / waiting.pieces
        for _ in range(waiting.pieces):
            free_at, number = slots[0]
            heapq.heapreplace(slots, (free_at + share / speeds[number], number))
    return slots[0][0] + rest / sum(speed * server.num_slots for speed, server in zip(speeds, servers, strict=True))


def _total(job: Running, speed: float, chance: random.Random) -> float:
    """How much work it is in all, given how long it has taken already."""
    done = job.elapsed_s * speed * job.pieces
    possible = [amount for amount in job.amounts if amount > done]
    return chance.choice(possible) if possible else done * (1.0 + 0.2 * chance.random())
