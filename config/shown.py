"""Values of settings as people may see them."""

from __future__ import annotations

from typing import Any

from .redis_url import mask_url

SECRETS = {"gateway_metrics_token", "reasoning_key", "hub_token"}


def shown(where: str, value: Any) -> str:
    """As Python writes it, without what is secret in it; `where` is the setting, with dots."""
    if where == "redis_url":
        return repr(mask_url(str(value)))
    return "***" if where.rpartition(".")[2] in SECRETS else repr(value)
