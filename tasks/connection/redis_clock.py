"""Redis' clock, for Python and for scripts: all machines share it. Times of two are never compared by their own."""

from __future__ import annotations

from importlib.resources import files
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

"""


def lua_source(package: str, *names: str) -> str:
    """The scripts of these names in the folder `lua` of a package, one after the other, behind the clock."""
    folder = files(package) / "lua"
    return LUA_CLOCK + "".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)


def seconds_of(reply: Any) -> float:
    """Unix seconds of a reply to TIME."""
    seconds, micros = reply
    return float(seconds) + float(micros) / 1e6


def redis_time(redis: Redis) -> float:
    """Unix seconds by Redis' clock."""
    return seconds_of(redis.time())
