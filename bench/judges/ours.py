"""Send the requests of a judge with our own client, and compute the same figures."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from cellama.bench.harness.engines import percentile
from cellama.bench.peers.http_client import openai_events

from .figures import Definitions, RunFigures, SentRequest

PATH = "/v1/completions"


@dataclass
class _Reading:
    """The times of one request in seconds, and its number of generated tokens."""

    asked: float = field(default_factory=time.monotonic)
    pieces: list[float] = field(default_factory=list)
    num_new: int = 0
    ended: float = 0.0  # end of the stream

    @property
    def first_ms(self) -> float:
        return (self.pieces[0] - self.asked) * 1e3

    @property
    def gap_ms(self) -> float:
        return (self.pieces[-1] - self.pieces[0]) * 1e3 / (self.num_new - 1)


async def measure(port: int, sent: Sequence[SentRequest], concurrency: int, definitions: Definitions) -> RunFigures:
    """Send the same bodies at the same times, or one after another from a number of concurrent callers.

    Times count if `concurrency` is 0. A request without text has failed. The bodies ask for
    the token usage. Raises RuntimeError if the server reports an error.
    """
    started = time.monotonic()
    if concurrency:
        waiting = iter(sent)

        async def call() -> list[_Reading]:
            return [await _send(port, request.body) for request in waiting]

        readings = await asyncio.gather(*(call() for _ in range(concurrency)))
        found = list(itertools.chain.from_iterable(readings))
    else:

        async def arrive(request: SentRequest) -> _Reading:
            await asyncio.sleep(started + request.at_s - time.monotonic())
            return await _send(port, request.body)

        found = list(await asyncio.gather(*map(arrive, sent)))
    return _figures(found, definitions)


async def _send(port: int, body: dict[str, Any]) -> _Reading:
    reading = _Reading()
    async for event in openai_events(port, PATH, body):
        if any(choice.get("text") for choice in event["choices"]):
            reading.pieces.append(time.monotonic())
        if usage := event.get("usage"):
            reading.num_new = usage["completion_tokens"]
    reading.ended = time.monotonic()
    return reading


def _figures(found: Sequence[_Reading], definitions: Definitions) -> RunFigures:
    num_failed = sum(not each.pieces for each in found)
    found = [each for each in found if each.pieces]
    ends = [each.ended if definitions.waits_for_end else each.pieces[-1] for each in found]
    seconds = max(ends) - min(each.asked for each in found)
    gaps = [(each.gap_ms, each.num_new - 1 if definitions.weighs_gaps else 1) for each in found if each.num_new > 1]
    firsts = [each.first_ms for each in found]
    return RunFigures(
        requests=len(found),
        failed=num_failed,
        request_rate=len(found) / seconds,
        token_rate=sum(each.num_new for each in found) / seconds,
        first_mean_ms=mean(firsts),
        first_p50_ms=median(firsts),
        first_p95_ms=percentile(firsts, 0.95),
        gap_mean_ms=sum(gap * weight for gap, weight in gaps) / sum(weight for _, weight in gaps),
        latency_mean_ms=mean((end - each.asked) * 1e3 for end, each in zip(ends, found, strict=True)),
    )
