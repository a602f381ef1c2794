"""The keys of a gateway, as the settings have them."""

from __future__ import annotations

import asyncio
import logging

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from cellama.api.http.callers import LoopbackOnly, is_loopback
from cellama.api.keys.key_file import KeyFile
from cellama.api.keys.store import KeyStore
from cellama.config import Settings, SettingsError
from cellama.tasks.connection.connections import connect_async

from .access import ANSWER_S, KeyAccess

log = logging.getLogger(__name__)


def connect_keys(url: str | None = None) -> Redis:
    """Redis at the URL, or that of the settings. What is asked again, after a lost connection, has no other effect."""
    again = Retry(NoBackoff(), 1)
    return connect_async(url, socket_connect_timeout=ANSWER_S, socket_timeout=ANSWER_S, retry=again)


def key_access(settings: Settings, host: str | None = None) -> KeyAccess:
    """Lets in who has a key. At a `host` on loopback it lets in requests of this machine while there are no keys.

    Raises SettingsError for a host that other machines reach if there are none, and for a wrong file of keys.
    """
    file = None if settings.gateway_keys_file is None else KeyFile(settings.gateway_keys_file)
    if host is None or is_loopback(host):
        keyless = None if host is None else LoopbackOnly()
        return KeyAccess(connect_keys(settings.redis_url), file, keyless=keyless)
    asyncio.run(_check_keys(settings, file, host))
    return KeyAccess(connect_keys(settings.redis_url), file)


async def _check_keys(settings: Settings, file: KeyFile | None, host: str) -> None:
    async with connect_keys(settings.redis_url) as redis:
        try:
            has_keys = bool(await KeyStore(redis, file).all())
        except RedisError as error:
            log.warning("whether there are API keys can't be seen yet; until then no request is let in: %s", error)
            return
    if not has_keys:
        raise SettingsError(
            f"{host} can be reached by others, and there are no API keys: each of them could use your models; "
            "make a key (`cellama keys create TENANT`), or listen on 127.0.0.1"
        )
