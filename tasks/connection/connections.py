"""Connect to Redis with any format of the setting `redis_url`, and read Redis' clock.

All machines share Redis' clock, so cellama compares times from different machines only by this clock.
"""

from __future__ import annotations

import ssl
from importlib.resources import files
from typing import Any
from urllib.parse import quote, urlencode

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from cellama.config import get_settings
from cellama.config.local_redis import with_stored_password
from cellama.config.redis_url import RedisUrl, parse_redis_url

from .redis_errors import convert_refusals, convert_refusals_async

SOCKET_OPTIONS: dict[str, Any] = {
    "socket_timeout": 30,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
}
# Unlimited for each client, because each thread that reads a stream needs a connection. Redis itself has `maxclients`.
CONNECT_TIMEOUT_S = 3.0  # a reachable Redis accepts connections immediately, so a longer timeout only delays the error
MAX_CONNECTIONS = 1 << 31
SENTINEL_TIMEOUT_S = 2.0  # until the next sentinel is queried
_CERTIFICATE_CHECKS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_TCP_ONLY = ("socket_connect_timeout", "socket_keepalive")

LUA_CLOCK = """\
-- Returns Unix seconds by the clock of Redis, or the time that a test passes. A script reads the clock at most once.
local time_of_call
local function clock(time_of_test)
  if time_of_test and time_of_test ~= '' then return tonumber(time_of_test) end
  if not time_of_call then
    local time = redis.call('TIME')
    time_of_call = tonumber(time[1]) + tonumber(time[2]) / 1e6
  end
  return time_of_call
end

local function stamp(seconds)
  return string.format('%.6f', seconds)
end

"""


def connect(url: str | None = None, **options: Any) -> Redis:
    """Return a client for this URL (default: `redis_url`). `options` are passed to redis-py's connections."""
    where = _where(url)
    if where.kind == "sentinel":
        master: Redis = _sentinel(Sentinel, where, options).master_for(
            where.master_name, max_connections=MAX_CONNECTIONS
        )
        return convert_refusals(master)
    options = {"max_connections": MAX_CONNECTIONS, **_fitting(where, options)}
    return convert_refusals(Redis.from_url(_url_for_redis_py(where), **options))


def connect_async(url: str | None = None, **options: Any) -> AsyncRedis:
    """Return an asyncio client. The arguments are the same as for `connect`."""
    where = _where(url)
    if where.kind == "sentinel":
        master: AsyncRedis = _sentinel(AsyncSentinel, where, options).master_for(
            where.master_name, max_connections=MAX_CONNECTIONS
        )
        return convert_refusals_async(master)
    options = {"max_connections": MAX_CONNECTIONS, **_fitting(where, options)}
    return convert_refusals_async(AsyncRedis.from_url(_url_for_redis_py(where), **options))


def _sentinel(kind: Any, where: RedisUrl, options: dict[str, Any]) -> Any:
    master_options = {"db": where.db, "username": where.username, "password": where.password}
    return kind(where.hosts, sentinel_kwargs=sentinel_options(where), **master_options, **options)


def database_of(redis: Redis | AsyncRedis) -> int:
    """Return the database number that a client uses."""
    return int(redis.connection_pool.connection_kwargs.get("db") or 0)


def broker_options(url: str) -> dict[str, Any]:
    """Return Celery's settings for this URL.

    If Celery received only the URL, it would not check the server's certificate.
    """
    where = _where(url)
    tls = dict(where.tls)
    checks = {"ssl_cert_reqs": _CERTIFICATE_CHECKS[tls["ssl_cert_reqs"]]} if tls else {}
    return {"broker_url": _url_for_kombu(where), "broker_use_ssl": {**tls, **checks} if tls else None}


def sentinel_options(where: RedisUrl) -> dict[str, Any]:
    """Return the options for connections to the sentinels."""
    return {
        "username": where.sentinel_username,
        "password": where.sentinel_password,
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
    }


def transport_options(url: str) -> dict[str, Any]:
    """Return the options that kombu's transport needs in addition to the broker's URL."""
    where = parse_redis_url(url)
    if where.kind != "sentinel":
        return {}
    return {"master_name": where.master_name, "sentinel_kwargs": sentinel_options(where)}


def _where(url: str | None) -> RedisUrl:
    """Parse this URL (default: `redis_url`), and add the password of the Redis server that `cellama up` runs."""
    settings = get_settings()
    return with_stored_password(parse_redis_url(url or settings.redis_url), settings.data_dir)


def _fitting(where: RedisUrl, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if where.kind != "socket" or name not in _TCP_ONLY}


def _addresses(where: RedisUrl) -> list[str]:
    hosts = [f"[{host}]" if ":" in host else host for host, _ in where.hosts]
    return [f"{where.credentials}{host}:{port}/{where.db}" for host, (_, port) in zip(hosts, where.hosts, strict=True)]


def _url_for_redis_py(where: RedisUrl) -> str:
    if where.kind == "socket":
        return f"unix://{where.credentials}{quote(where.path)}?db={where.db}"
    scheme = "rediss" if where.kind == "tls" else "redis"
    return f"{scheme}://{_addresses(where)[0]}" + (f"?{urlencode(where.tls)}" if where.tls else "")


def _url_for_kombu(where: RedisUrl) -> str:
    if where.kind == "socket":
        return f"redis+socket://{where.credentials}{quote(where.path)}?virtual_host={where.db}"
    scheme = {"tls": "rediss", "sentinel": "sentinel"}.get(where.kind, "redis")
    return ";".join(f"{scheme}://{address}" for address in _addresses(where))


def lua_source(package: str, *names: str) -> str:
    """Return the Lua clock functions, followed by these scripts from a package's `lua` directory, as one string."""
    directory = files(package) / "lua"
    return LUA_CLOCK + "".join((directory / f"{name}.lua").read_text(encoding="utf-8") for name in names)


def seconds_of(reply: Any) -> float:
    """Convert the reply to a TIME command into Unix seconds."""
    seconds, micros = reply
    return float(seconds) + float(micros) / 1e6


def redis_time(redis: Redis) -> float:
    """Return the time in Unix seconds by Redis' clock."""
    return seconds_of(redis.time())
