"""What the models of a process do together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cellama.engine.snapshots import ManagerSnapshot, ModelSnapshot, busiest

SUMS = tuple(field.name for field in fields(ManagerSnapshot) if field.name not in ("phase", "models"))


def totals_of(models: Sequence[ModelSnapshot]) -> ManagerSnapshot:
    """The sums over all engines, embedders and rerankers of these models; what one of them does not count is 0."""
    parts = [part for model in models for part in model.parts]
    sums: dict[str, Any] = {name: sum(getattr(part, name, 0) for part in parts) for name in SUMS}
    return ManagerSnapshot(phase=busiest([part.phase for part in parts]), models=len(models), **sums)
