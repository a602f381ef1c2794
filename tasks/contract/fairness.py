"""Fairness keys, and the cost of jobs in tokens (docs/fair-share.md).

Waiting jobs with the same queue and priority share the workers by fairness key. Slashes separate the levels of a key,
as in `org/team/user`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from cellama.config import get_settings

from .errors import InvalidJob
from .names import queue_name

MAX_KEY_BYTES = 64
DIGEST_CHARS = 16  # of a user whose name is not a valid level: 64 bits distinguish all users of a tenant
FAIRNESS_KEY_HEADER = "fairness_key"  # header of a message from plain Celery


def is_fairness_key(key: object) -> bool:
    """Return whether a value is a valid fairness key. The empty key is valid."""
    return (
        isinstance(key, str)
        and key.isprintable()
        and len(key.encode(errors="replace")) <= MAX_KEY_BYTES
        and (not key or all(key.split("/")))
    )


def check_fairness_key(key: object) -> str:
    """Return a call's fairness key. Raises InvalidJob."""
    if not isinstance(key, str) or not is_fairness_key(key):
        raise InvalidJob(
            f"fairness_key: {key!r} is not valid; use up to {MAX_KEY_BYTES} bytes of printable text, with a slash "
            "between levels, such as org/team/user"
        )
    return key


def fairness_key_of(name: str) -> str:
    """Return a tenant's fairness key. A name that is not a valid key is replaced with its digest."""
    return name if is_fairness_key(name) else hashlib.sha256(name.encode(errors="replace")).hexdigest()


def limit_name(key: str = "", *, model: str | None = None) -> str:
    """Return the name that identifies the limit of a fairness key or a model.

    A fairness key never starts with a slash.
    """
    return key if model is None else f"/{queue_name(model)}"


def fairness_key_below(parent: str, name: str) -> str:
    """Return the fairness key of a user as a child of the tenant's key `parent`.

    Return the tenant's key itself if even a digest of the user's name would make the key too long.
    """
    if not parent:
        return parent
    readable = f"{parent}/{name}"
    if "/" not in name and is_fairness_key(readable):
        return readable
    key = f"{parent}/{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:DIGEST_CHARS]}"
    return key if is_fairness_key(key) else parent


def cost_of(usage: Mapping[str, Any]) -> float:
    """Return the cost of computed tokens, measured in generated tokens. Cached tokens are free."""
    num_computed = max(0, usage.get("prompt_tokens", 0) - usage.get("cached_tokens", 0))
    return float(usage.get("completion_tokens", 0) + get_settings().prefill_cost * num_computed)
