"""Helpers for keys and limits."""

from __future__ import annotations

from typing import Any

from cellama.api.keys.entry import KeyEntry, KeyText, new_key

from ..conftest import Run

__all__ = ["Run", "key_and_entry"]


def key_and_entry(**fields: Any) -> tuple[KeyText, KeyEntry]:
    key = new_key()
    return key, KeyEntry.model_validate({"id": key.id, "digest": key.digest, "tenant": "acme", **fields})
