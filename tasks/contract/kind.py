"""What differs between the kinds of jobs. Nothing is decided by a task's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .payloads import BaseJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A task as its callers, its workers and the ledger need to know it. The docstring of its payload describes it."""

    task: str
    payload: type[BaseJob]
    positional: tuple[str, ...]  # the parameters that may be given by position
    result: type[Mapping[str, object]]  # the shape of what callers get
    is_public: bool = True  # False: only cellama itself queues it
    completes: bool = False  # its result is a completion, so that an early end leaves a shorter one
    streams: bool = True  # may publish its output token by token
    keeps_journal: bool = False  # its results are events: they stay as long as results do
    shape: Callable[[Any], Any] = lambda result: result  # the result as callers get it, from the completion
    operation: str | None = None  # what traces call it, if a model computes for it (traces/conventions.py)
