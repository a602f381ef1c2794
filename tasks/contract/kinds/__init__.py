"""The kinds of jobs. Each kind has a module with its payload, its result and its `Kind`.

`contract/all_kinds.py` collects the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..payloads import BaseJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The properties of a kind of job. The kind itself is described in the docstring of its payload."""

    task: str
    payload: type[BaseJob]
    positional: tuple[str, ...]  # parameters that can be given by position
    result: type[Mapping[str, object]]  # shape of the result that callers get
    is_public: bool = True  # False: only cellama itself queues it
    completes: bool = False  # its result is a completion, so a job that ends early has a shorter result
    streams: bool = True  # can publish its output token by token
    keeps_journal: bool = False  # its events contain results, so they expire as late as results
    shape: Callable[[Any], Any] = lambda result: result  # converts a completion into the result for callers
    operation: str | None = None  # name of the operation in traces; None: no model computes (traces/conventions.py)
