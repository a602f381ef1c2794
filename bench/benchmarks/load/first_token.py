"""Where the time of the slowest first tokens went, step by step.

| column | from … to | who says so |
|---|---|---|
| `sending` | the reader's call … the job is in Redis, and the call is back | the reader |
| `queue` | it is in Redis … the worker's engine is given it | `delivery_ms` |
| `prefix` | while another one computes a prefix that it begins with | `prefix_wait_ms` |
| `admission` | the engine is given it … it has a slot, but for `prefix` | `queue_ms`, less those two |
| `reading` | it has a slot … its first token is sampled; others may be read first | `ttft_ms` less `queue_ms` |
| `publishing` | the token is sampled … the reader has it | the reader, less all these |

There is no decode step before the first token: it comes from the pass that reads the end of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .arrivals import LOADS, Phase
from .sides import Reading

PART = "slowest"
NUM_SLOWEST = 10


def slowest(phases: Iterable[Phase]) -> Iterator[dict[str, Any]]:
    """A row for each of the slowest first tokens, alone and beside bulk work, at all rates; the slowest come first."""
    phases = list(phases)
    for load in LOADS:
        found = [(phase, reading) for phase in phases if phase.load == load for reading in phase.readings]
        found.sort(key=lambda pair: pair[1].ttft_ms, reverse=True)
        for phase, reading in found[:NUM_SLOWEST]:
            yield {"part": PART, "load": load, "rate/s": phase.rate, "prompt": len(reading.line.prompt)} | steps(
                reading
            )


def steps(reading: Reading) -> dict[str, float]:
    """The steps of one first token, in milliseconds, and all of it as its reader saw it."""
    said, sending = reading.timings, reading.sent_s * 1e3
    queue, prefix = said["delivery_ms"], said["prefix_wait_ms"]
    admission, reading_ms = said["queue_ms"] - queue - prefix, said["ttft_ms"] - said["queue_ms"]
    own = {"sending": sending, "queue": queue, "prefix": prefix, "admission": admission, "reading": reading_ms}
    return {"first token ms": reading.ttft_ms, **own, "publishing": reading.ttft_ms - sending - said["ttft_ms"]}
