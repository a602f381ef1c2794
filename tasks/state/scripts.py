"""The Lua scripts of the ledger (tasks/state/lua): each is one step that happens whole or not at all."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.commands.core import Script

from cellama.tasks.contract.keys import (
    DEAD_KEY,
    DUE_KEY,
    LEASES_KEY,
    MISSING_KEY,
    PRIORITY_WEIGHT,
    QUEUES_KEY,
    RUNNING_KEY,
    journal_key,
    waiting_key,
)
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, WEIGHT_HEADER

CONSTANTS: dict[str, str | float] = {
    "WAITING": waiting_key(""),
    "JOURNAL": journal_key(""),
    "QUEUES": QUEUES_KEY,
    "RUNNING": RUNNING_KEY,
    "DUE": DUE_KEY,
    "LEASES": LEASES_KEY,
    "MISSING": MISSING_KEY,
    "DEAD": DEAD_KEY,
    "WEIGHT": PRIORITY_WEIGHT,
    "OURS": SUBMITTED_AT_HEADER,
    "WEIGHS": WEIGHT_HEADER,
}


def run_script(redis: Redis, name: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    """What the script of this name returns. Raises RedisError."""
    return _script(name)(keys=keys, args=args, client=redis)


def sha(name: str) -> str:
    """The name by which Redis knows a script that it has run."""
    return str(_script(name).sha)


@functools.cache
def _script(name: str) -> Script:
    return Script(None, source(name).encode())  # type: ignore[arg-type]  # each call names its client


def source(name: str) -> str:
    """A script with its constants and what all share."""
    constants = "".join(f"local {constant} = {value!r}\n" for constant, value in CONSTANTS.items())
    return constants + _read("prelude") + _read(name)


@functools.cache
def _read(name: str) -> str:
    return (files("cellama.tasks.state") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
