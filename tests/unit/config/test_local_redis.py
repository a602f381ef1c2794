"""The password of the Redis server that `cellama up` runs, which other programs of the user find in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cellama.config.local_redis import URL_FILE, redis_dir, with_stored_password
from cellama.config.redis_url import parse_redis_url


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    redis_dir(tmp_path).mkdir()
    (redis_dir(tmp_path) / URL_FILE).write_text("redis://:s%2Fcret@127.0.0.1:6379/0\n")
    return tmp_path


@pytest.mark.parametrize("url", ["redis://127.0.0.1:6379/0", "redis://localhost/3"])
def test_local_redis_url_gets_the_stored_password(data_dir: Path, url: str) -> None:
    plain = parse_redis_url(url)
    assert with_stored_password(plain, data_dir) == replace(plain, password="s/cret")


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6380/0",
        "redis://redis.internal:6379/0",
        "redis://:own@127.0.0.1:6379/0",
        "redis://me:own@localhost:6379/0",
        "rediss://127.0.0.1:6379/0",
        "unix:///run/redis.sock",
        "sentinel://127.0.0.1:6379/0?master_name=m",
    ],
)
def test_other_redis_urls_are_unchanged(data_dir: Path, url: str) -> None:
    assert with_stored_password(parse_redis_url(url), data_dir) == parse_redis_url(url)


@pytest.mark.parametrize("text", [None, "", "nonsense", "redis://127.0.0.1:6379/0", "\udcff"])
def test_local_redis_url_is_unchanged_when_no_password_is_stored(tmp_path: Path, text: str | None) -> None:
    where = parse_redis_url("redis://127.0.0.1:6379/0")
    if text is not None:
        redis_dir(tmp_path).mkdir()
        (redis_dir(tmp_path) / URL_FILE).write_bytes(text.encode(errors="surrogateescape"))
    assert with_stored_password(where, tmp_path) == where
