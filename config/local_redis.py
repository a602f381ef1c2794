"""Find the password of the Redis server that `cellama up` runs, so that the user's other programs can connect."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from .redis_url import RedisUrl, parse_redis_url

URL_FILE = "url"  # file with the server's URL, including its password, in its data directory
LOOPBACK_HOSTS = ("127.0.0.1", "localhost")


def redis_dir(data_dir: Path) -> Path:
    """Return the embedded Redis server's directory, which contains the append-only file, the log, and `URL_FILE`."""
    return data_dir / "redis"


def stored_url(directory: Path) -> RedisUrl | None:
    """Return the URL of the server that last ran in this directory, or None if the file is missing or invalid."""
    with contextlib.suppress(OSError, ValueError):
        return parse_redis_url((directory / URL_FILE).read_text(encoding="utf-8").strip())
    return None


def with_stored_password(where: RedisUrl, data_dir: Path) -> RedisUrl:
    """Return the URL.

    If the URL points to the embedded Redis server and has no credentials, add the server's password.
    """
    if where.kind != "server" or where.credentials or where.hosts[0][0] not in LOOPBACK_HOSTS:
        return where
    stored = stored_url(redis_dir(data_dir))
    if stored is None or stored.hosts[0][1] != where.hosts[0][1]:
        return where
    return replace(where, username=stored.username, password=stored.password)
