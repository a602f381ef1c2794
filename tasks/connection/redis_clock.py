"""Redis' clock: the one that all machines share. Times of two machines are never compared by their own clocks."""

from __future__ import annotations

from typing import Any

from redis import Redis


def seconds_of(reply: Any) -> float:
    """Unix seconds of a reply to TIME."""
    seconds, micros = reply
    return float(seconds) + float(micros) / 1e6


def redis_time(redis: Redis) -> float:
    """Unix seconds by Redis' clock."""
    return seconds_of(redis.time())
