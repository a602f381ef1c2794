"""Redis' clock: the one that all machines share. Times of two machines are never compared by their own clocks."""

from __future__ import annotations

from typing import Any

from redis import Redis

LUA_CLOCK = """\
-- Unix seconds of the one clock that counts: Redis' own; or what a test tells.
local function clock(told)
  if told and told ~= '' then return tonumber(told) end
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function stamp(seconds)
  return string.format('%.6f', seconds)
end

"""  # what scripts have before them


def seconds_of(reply: Any) -> float:
    """Unix seconds of a reply to TIME."""
    seconds, micros = reply
    return float(seconds) + float(micros) / 1e6


def redis_time(redis: Redis) -> float:
    """Unix seconds by Redis' clock."""
    return seconds_of(redis.time())
