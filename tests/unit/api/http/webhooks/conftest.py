"""Fixtures of webhooks: an empty database of the Redis server, and an endpoint on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cellama.api.machine.redis_server import RedisServer

from .....conftest import empty_database
from .....receivers import Receiver, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def redis_url(redis_server: RedisServer) -> Iterator[str]:
    """Return the URL of an empty database."""
    with empty_database(redis_server, 8) as url:
        yield url
