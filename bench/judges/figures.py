"""The figures that judges and our own client report for a workload, and the requests that a judge sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

AGREEMENT = 0.05  # our own figures should differ from a judge's by at most this share


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run. Latencies are in milliseconds, and rates are per second.

    The gap is the mean time between tokens of a request after its first token. The judge defines the
    mean over the requests, and when a request ends (see Definitions).
    """

    requests: int
    failed: int
    request_rate: float
    token_rate: float  # of generated tokens
    first_mean_ms: float
    first_p50_ms: float
    first_p95_ms: float
    gap_mean_ms: float
    latency_mean_ms: float

    def difference_to(self, other: RunFigures) -> dict[str, float]:
        """Return by how much each rate and mean of these figures differs from the other's, as a share."""
        names = ("token_rate", "first_mean_ms", "gap_mean_ms", "latency_mean_ms")
        return {name: getattr(self, name) / getattr(other, name) - 1 for name in names}


@dataclass(frozen=True, slots=True)
class Definitions:
    """How a judge defines its figures."""

    weighs_gaps: bool  # whether a request's gap counts as often as the request has gaps
    waits_for_end: bool  # whether a request ends with its stream, or with its last token


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request as a judge sent it, with the seconds since the judge's first request."""

    at_s: float
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Judgement:
    """A judge's figures for a run, and the requests that the judge sent, in order."""

    figures: RunFigures
    sent: Sequence[SentRequest]


def in_order(found: Sequence[tuple[float, dict[str, Any]]]) -> list[SentRequest]:
    """Return requests with any clock's start times in seconds as requests relative to the first one."""
    start = min((at_s for at_s, _ in found), default=0.0)
    return [SentRequest(at_s - start, body) for at_s, body in sorted(found, key=lambda pair: pair[0])]
