"""How a job ends whose `timeout` is over before a worker has it."""

from __future__ import annotations

from .all_kinds import KINDS, Result
from .events import TerminalEvent, done, error
from .kinds.generate import GenerateResult
from .shapes.results import usage_of

TOO_LATE = "no worker came to the job within its timeout; raise it, or start more workers"


def ending_of_late(task: str, text: str = "", num_tokens: int = 0) -> tuple[TerminalEvent, Result | None]:
    """Return the last event of a job whose `timeout` is over while no worker has it, and its result if there is one.

    `text` and `num_tokens` are what earlier attempts wrote of its first completion.
    """
    kind = KINDS.get(task)
    if kind is None or not kind.completes:
        return error("timeout", TOO_LATE), None
    usage = usage_of(completion_tokens=num_tokens)
    result: GenerateResult = {
        "text": text,
        "finish_reason": "timeout",
        "stop_sequence": None,
        "usage": usage,
        "timings": {},
    }
    return done("timeout", usage), kind.shape(result)
