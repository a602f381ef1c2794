"""A model by its id, from the load that is begun to the last use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from cellama.engine.capabilities import Capability

from .model import Model

Status = Literal["loading", "ready", "unloading"]


@dataclass(slots=True)
class ModelEntry:
    """A model by its id. While it is loading `model` is None, and `capabilities` are those that were asked for."""

    id: str
    source: str
    capabilities: frozenset[Capability]
    status: Status = "loading"
    model: Model | None = None
    since: float = 0.0  # unix seconds at which it became ready
    num_holds: int = 0  # by those who may be about to use it


def new_id(source: str, taken: Mapping[str, ModelEntry]) -> str:
    """The name of the source, with a number if another model has it."""
    name = PurePosixPath(source.partition("://")[2] or source).name.removesuffix(".gguf") or "model"  # as id_of_source
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate
