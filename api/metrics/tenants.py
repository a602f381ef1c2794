"""Tenants: what the limits of their keys know of them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from redis import Redis

from cellama.api.keys.entry import KeyEntry
from cellama.tasks.contract.keys import API_KEYS_KEY, key_charges_key, key_jobs_key
from cellama.tasks.metrics.families import Figures

MOST_KEYS = 100


def add_tenants(redis: Redis, figures: Figures, now: float) -> bool:
    """Adds those of the first keys by id that are active. True if there are more. Raises RedisError."""
    told: Any = redis.hgetall(API_KEYS_KEY)
    found = [entry for raw in told.values() if (entry := _parsed(raw)) is not None and entry.state(now) == "active"]
    entries = sorted(found, key=lambda entry: entry.id)[:MOST_KEYS]
    pipeline = redis.pipeline(transaction=False)
    for entry in entries:
        pipeline.zcount(key_jobs_key(entry.id), now, "+inf")
        pipeline.hget(key_charges_key(entry.id), "tokens")
    answers = iter(pipeline.execute())
    for entry in entries:
        jobs, tokens = next(answers), next(answers)
        figures.add("cellama_tenant_jobs", jobs, entry.tenant)
        figures.add("cellama_tenant_window_tokens", float(tokens or 0), entry.tenant)
    return len(found) > MOST_KEYS


def _parsed(raw: bytes) -> KeyEntry | None:
    try:
        return KeyEntry.model_validate_json(raw)
    except ValidationError:  # the gateway says so in its log
        return None
