"""Convert model views into Anthropic model objects and pages of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cellama.tasks.contract.shapes.workers import ModelView


def model_info(view: ModelView) -> dict[str, Any]:
    """Return a model object.

    The display name is the model's id, and the creation time is the model's load time.
    """
    loaded_at = datetime.fromtimestamp(int(view.get("ready_at") or 0), UTC)
    ctx_per_slot = view.get("ctx_per_slot")
    max_tokens = ctx_per_slot - 1 if ctx_per_slot else None  # the prompt and the answer have at least one token each
    return {
        "type": "model",
        "id": view["id"],
        "display_name": view["id"],
        "created_at": loaded_at.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "deprecated_at": None,
        "retires_at": None,
        "line": None,
        "max_input_tokens": max_tokens,
        "max_tokens": max_tokens,
        "capabilities": None,
    }


def page_of(
    models: Sequence[Mapping[str, Any]], limit: int, after_id: str | None = None, before_id: str | None = None
) -> dict[str, Any]:
    """Return up to `limit` models after the model `after_id` or before the model `before_id`.

    Raises ValueError if no model has this id.
    """
    ids = [model["id"] for model in models]
    start, end = 0, len(ids)
    if after_id is not None:
        start = ids.index(after_id) + 1
    if before_id is not None:
        end = ids.index(before_id)
        page, has_more = models[max(start, end - limit) : end], end - limit > start
    else:
        page, has_more = models[start : start + limit], start + limit < end
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"data": list(page), "has_more": has_more, "first_id": first, "last_id": last}
