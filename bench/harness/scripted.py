"""Make a real model write given replies, so that tests can script an agent.

The temperature of a request selects its reply, because all APIs have this parameter. For example, 0.017 selects reply
17. Tokens come from the model's own vocabulary, so the engine, the gateway and the chat template work as usual.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellama.engine import SequenceStart

PROCESSOR = f"{__name__}:scripted"  # for the setting `logits_processors` of a model
SCRIPT_FILE = "BENCH_SCRIPT_FILE"  # environment variable of the worker: the file with the tokens of all replies
STEPS = 1000  # steps between two temperatures whose difference is 1


def temperature_of(number: int) -> float:
    """Return the temperature that selects the reply with this number (1 to 999)."""
    return number / STEPS


def write_script(path: Path, replies: Mapping[int, Sequence[int]]) -> None:
    """Atomically write the tokens of all replies to a file, which workers read when a request starts."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({str(number): list(tokens) for number, tokens in replies.items()}))
    part.rename(path)


class Scripted:
    """Forbids all tokens except the next token of a reply or, after the reply, the tokens that end a text."""

    def __init__(self, start: SequenceStart, reply: Sequence[int]) -> None:
        self._reply, self._ends, self._num_sampled = reply, sorted(start.end_tokens), start.num_sampled

    def apply(self, logits: NDArray[np.float32]) -> None:
        allowed = self._ends if self._num_sampled >= len(self._reply) else [self._reply[self._num_sampled]]
        kept = logits[allowed].copy()
        logits[:] = -np.inf
        logits[allowed] = kept

    def accept(self, token: int) -> None:
        self._num_sampled += 1


def scripted(start: SequenceStart) -> Scripted | None:
    """Return the processor for a request whose temperature selects a reply."""
    replies = json.loads(Path(os.environ[SCRIPT_FILE]).read_text())
    reply = replies.get(str(round(start.params.temperature * STEPS)))
    return None if reply is None else Scripted(start, reply)
