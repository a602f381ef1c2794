"""Check model ids, and derive ids for models that don't have one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import PurePosixPath
from typing import Any

_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
# Any line of text without spaces at its ends. Names that start with a colon are reserved (`:default`).
MODEL_ID = rf"^[^:\s{_CONTROL}](?:[^{_CONTROL}]*[^\s{_CONTROL}])?$"
DEFAULT_MODEL = ":default"  # stands for the model that serves jobs without a model of their own
MODEL_ID_RULE = "a model id must not contain control characters, start with a colon, or start or end with a space"


def id_of_source(source: str, taken: Collection[str] = ()) -> str:
    """Derive a model id from the source's file name, and append a number if another model already has this id."""
    name = PurePosixPath(source.partition("://")[2] or source).name.removesuffix(".gguf")
    name = re.sub(f"[{_CONTROL}]", "", name).strip().lstrip(": ") or "model"
    number = 1
    while (candidate := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    return candidate


def with_ids(models: Any) -> Any:
    """Return the models from the settings. Missing ids are derived from the models' sources."""
    if not isinstance(models, list | tuple):
        return models
    taken = {model["id"] for model in models if isinstance(model, dict) and isinstance(model.get("id"), str)}
    named = []
    for model in models:
        if isinstance(model, dict) and model.get("id") is None and isinstance(model.get("source"), str):
            model = {**model, "id": id_of_source(model["source"], taken)}
            taken.add(model["id"])
        named.append(model)
    return named


def parse_models(text: str) -> list[dict[str, Any]]:
    """Parse models such as `tiny=bundled://tiny,/models/big.gguf`, or a JSON list. Raises ValueError."""
    if text.lstrip().startswith("["):
        parsed = json.loads(text)
        return list(parsed)
    models: list[dict[str, Any]] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        model_id, equals, source = entry.partition("=")
        if equals:
            models.append({"id": model_id.strip(), "source": source.strip()})
        elif "/" in entry or entry.endswith(".gguf"):
            models.append({"source": entry})
        else:
            raise ValueError(f"{entry!r} is neither ID=SOURCE nor a source; write, for example, tiny=bundled://tiny")
    return models


def parse_aliases(text: str) -> dict[str, str]:
    """Parse aliases such as `gpt-4o-mini=chat,gpt-4o=large`, or a JSON object. Raises ValueError."""
    if text.lstrip().startswith("{"):
        parsed = json.loads(text)
        return dict(parsed)
    aliases: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        alias, equals, model = entry.partition("=")
        if not equals:
            raise ValueError(f"{entry!r} is not an alias; write it as ALIAS=MODEL, for example gpt-4o-mini=chat")
        aliases[alias.strip()] = model.strip()
    return aliases
