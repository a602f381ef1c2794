"""How a client is told of its limits: the headers that OpenAI sends."""

from __future__ import annotations

from cellama.api.keys.entry import KeyEntry

from .limiter import Verdict

NAMES = tuple(f"x-ratelimit-{part}-{of}" for part in ("limit", "remaining", "reset") for of in ("requests", "tokens"))


def rate_headers(entry: KeyEntry, verdict: Verdict) -> dict[str, str]:
    """`x-ratelimit-…` for each limit that the key has."""
    headers: dict[str, str] = {}
    used = {
        "requests": (entry.requests_per_minute, verdict.num_requests),
        "tokens": (entry.tokens_per_minute, verdict.num_tokens),
    }
    for what, (limit, num_used) in used.items():
        if limit is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(max(0, limit - num_used))
            headers[f"x-ratelimit-reset-{what}"] = duration(verdict.empty_in_s)
    return headers


def duration(seconds: float) -> str:
    """As OpenAI writes it: "20ms", "1.5s", "6m0s"."""
    total_ms = round(seconds * 1000)
    if total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    return f"{minutes}m{ms / 1000:g}s" if minutes else f"{ms / 1000:g}s"
