"""Make every connection to Redis, from any form of the setting `redis_url`."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import quote, urlencode

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.sentinel import Sentinel

from cellama.config import get_settings
from cellama.config.local_redis import with_kept_password
from cellama.config.redis_url import RedisUrl, parse_redis_url

from .refusals import be_patient, be_patient_async

SOCKET_OPTIONS: dict[str, Any] = {
    "socket_timeout": 30,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
}
MOST_CONNECTIONS = (
    1 << 31
)  # of a client: no limit, because each thread that reads a stream has one, and Redis has `maxclients`
SENTINEL_TIMEOUT_S = 2.0  # for one sentinel, until the next one is asked
_CERTIFICATE_CHECKS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
_TCP_ONLY = ("socket_connect_timeout", "socket_keepalive")


def connect(url: str | None = None, **options: Any) -> Redis:
    """Return a client for this URL, or that of the settings. `options` are those of redis-py's connections."""
    where = _where(url)
    if where.kind == "sentinel":
        master: Redis = _sentinel(Sentinel, where, options).master_for(
            where.master_name, max_connections=MOST_CONNECTIONS
        )
        return be_patient(master)
    options = {"max_connections": MOST_CONNECTIONS, **_fitting(where, options)}
    return be_patient(Redis.from_url(_url_for_redis_py(where), **options))


def connect_async(url: str | None = None, **options: Any) -> AsyncRedis:
    """Return a client for asyncio, as `connect` does."""
    where = _where(url)
    if where.kind == "sentinel":
        master: AsyncRedis = _sentinel(AsyncSentinel, where, options).master_for(
            where.master_name, max_connections=MOST_CONNECTIONS
        )
        return be_patient_async(master)
    options = {"max_connections": MOST_CONNECTIONS, **_fitting(where, options)}
    return be_patient_async(AsyncRedis.from_url(_url_for_redis_py(where), **options))


def _sentinel(kind: Any, where: RedisUrl, options: dict[str, Any]) -> Any:
    of_master = {"db": where.db, "username": where.username, "password": where.password}
    return kind(where.hosts, sentinel_kwargs=sentinel_options(where), **of_master, **options)


def database_of(redis: Redis | AsyncRedis) -> int:
    """Return the number of a client's database."""
    return int(redis.connection_pool.connection_kwargs.get("db") or 0)


def broker_options(url: str) -> dict[str, Any]:
    """Return Celery's settings for this URL. With the URL alone it would not check a server's certificate."""
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
    """Return what kombu's transport needs in addition to the broker's URL."""
    where = parse_redis_url(url)
    if where.kind != "sentinel":
        return {}
    return {"master_name": where.master_name, "sentinel_kwargs": sentinel_options(where)}


def _where(url: str | None) -> RedisUrl:
    """Return the parts of this URL, or that of the settings, with the password of the Redis that `cellama up` runs."""
    settings = get_settings()
    return with_kept_password(parse_redis_url(url or settings.redis_url), settings.data_dir)


def _fitting(where: RedisUrl, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if where.kind != "socket" or name not in _TCP_ONLY}


def _places(where: RedisUrl) -> list[str]:
    hosts = [f"[{host}]" if ":" in host else host for host, _ in where.hosts]
    return [f"{where.credentials}{host}:{port}/{where.db}" for host, (_, port) in zip(hosts, where.hosts, strict=True)]


def _url_for_redis_py(where: RedisUrl) -> str:
    if where.kind == "socket":
        return f"unix://{where.credentials}{quote(where.path)}?db={where.db}"
    scheme = "rediss" if where.kind == "tls" else "redis"
    return f"{scheme}://{_places(where)[0]}" + (f"?{urlencode(where.tls)}" if where.tls else "")


def _url_for_kombu(where: RedisUrl) -> str:
    if where.kind == "socket":
        return f"redis+socket://{where.credentials}{quote(where.path)}?virtual_host={where.db}"
    scheme = {"tls": "rediss", "sentinel": "sentinel"}.get(where.kind, "redis")
    return ";".join(f"{scheme}://{place}" for place in _places(where))
