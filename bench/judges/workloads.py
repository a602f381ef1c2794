"""Define the workloads of the judges: synthetic text, and requests in the shape of public traces.

The traces themselves are not included (see harness/traces.py). Lengths and times are divided so that a small model on
two cores can serve the requests. A prompt's number of blocks stays as published, because blocks shrink with prompts.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cellama.bench.harness.engines import FIRST_WORD, LAST_WORD
from cellama.bench.harness.traces import BLOCK, azure_conversation, conversations, single_requests

PROMPT_TOKENS, NEW_TOKENS = 128, 32  # of synthetic text
AZURE_SCALE = 8  # divides the lengths of prompts and completions
MOONCAKE_SCALE = 32  # divides the lengths of prompts, the blocks, and the times between turns
MOONCAKE_NEW_SCALE = 16  # divides the lengths of completions
BLOCK_TOKENS = BLOCK // MOONCAKE_SCALE
CONTEXT_TOKENS = 2048  # per slot; longer requests are omitted
MARGIN_TOKENS = 128  # a prompt that a judge generates can have more tokens than requested


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A request of a trace, in the format of Mooncake's traces. The timestamp is in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for a judge: synthetic text from a number of concurrent callers, or the requests of a trace."""

    name: str
    num_requests: int
    concurrency: int = 0  # 0 for a trace
    rows: tuple[TraceRow, ...] = ()

    @property
    def has_blocks(self) -> bool:
        """Return whether the trace has hashes of blocks, which prompts share."""
        return bool(self.rows and self.rows[0].hash_ids)

    def write(self, path: Path) -> None:
        """Write the trace as JSONL. Rows without hashes have no `hash_ids`."""
        rows = [{key: value for key, value in asdict(row).items() if value != ()} for row in self.rows]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def synthetic(concurrency: int, num_requests: int) -> Workload:
    """Return a workload of synthetic text from this number of concurrent callers."""
    return Workload(f"synthetic, {concurrency} at once", num_requests, concurrency)


def mooncake(num_requests: int, per_s: float, seed: int) -> Workload:
    """Return requests in the shape of Mooncake's conversation trace, with `per_s` requests per second on average."""
    rows = []
    partial = itertools.count(1 << 20)  # numbers of last blocks, which no other prompt shares unless they are full
    for session in conversations(2 * num_requests, per_s, seed):  # the last turns of these sessions are too late
        now, blocks = session.at, list[int]()
        for turn in session.turns:
            now += turn.think_s / MOONCAKE_SCALE
            blocks += turn.blocks
            is_full = turn.num_prompt % BLOCK == 0
            hash_ids = tuple(blocks) if is_full else (*blocks[:-1], next(partial))
            length = math.ceil(turn.num_prompt / MOONCAKE_SCALE)
            rows.append(TraceRow(round(now * 1e3), length, _completion(turn.num_new, MOONCAKE_NEW_SCALE), hash_ids))
    return _trace("Mooncake conversations", rows, num_requests)


def azure(num_requests: int, per_s: float, seed: int) -> Workload:
    """Return requests in the shape of Azure's conversation trace, with `per_s` requests per second on average."""
    rows = []
    for session in single_requests(azure_conversation, 2 * num_requests, per_s, seed):
        [turn] = session.turns
        length = math.ceil(turn.num_prompt / AZURE_SCALE)
        rows.append(TraceRow(round(session.at * 1e3), length, _completion(turn.num_new, AZURE_SCALE), ()))
    return _trace("Azure conversations", rows, num_requests)


TRACES = {"azure": azure, "mooncake": mooncake}


def _completion(num_new: int, scale: int) -> int:
    return max(2, round(num_new / scale))  # there is no gap between tokens without a second token


def _trace(name: str, rows: Sequence[TraceRow], num_requests: int) -> Workload:
    """Return the first requests that fit into a slot's context. The first one arrives at 0."""
    fitting = [row for row in rows if row.input_length + row.output_length + MARGIN_TOKENS <= CONTEXT_TOKENS]
    fitting = sorted(fitting, key=lambda row: row.timestamp)[:num_requests]
    start = fitting[0].timestamp
    shifted = tuple(replace(row, timestamp=row.timestamp - start) for row in fitting)
    return Workload(name, len(shifted), rows=shifted)


def saturating(workload: Workload, count: int) -> Workload:
    """Return synthetic text as rows that all arrive at once, for our own client."""
    row = TraceRow(0, PROMPT_TOKENS, NEW_TOKENS, ())
    return Workload(workload.name, count, workload.concurrency, (row,) * count)


def prompts(workload: Workload) -> Iterator[list[int]]:
    """Yield a prompt of random tokens for each row, in which equal blocks have equal tokens."""
    for number, row in enumerate(workload.rows):
        num_blocks = math.ceil(row.input_length / BLOCK_TOKENS)
        blocks = row.hash_ids or [f"{number} {index}" for index in range(num_blocks)]
        tokens = itertools.chain.from_iterable(map(_block, blocks))
        yield list(itertools.islice(tokens, row.input_length))


def _block(name: int | str) -> list[int]:
    rng = random.Random(f"block {name}")
    return [rng.randrange(FIRST_WORD, LAST_WORD) for _ in range(BLOCK_TOKENS)]
