"""One error for the many ways in which Redis does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kombu.exceptions import OperationalError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cellama.config import get_settings

from .contract.errors import RedisUnreachable

_NO_ANSWER = (RedisConnectionError, RedisTimeoutError, OperationalError)


@contextmanager
def reaching_redis() -> Iterator[None]:
    """Raises RedisUnreachable, which names the URL without its password, when Redis does not answer inside."""
    try:
        yield
    except _NO_ANSWER as error:
        raise _unreachable(error) from None
    except RuntimeError as error:  # Celery's result backend, after its retries
        if not isinstance(error.__cause__, _NO_ANSWER):
            raise
        raise _unreachable(error.__cause__) from None


def _unreachable(error: BaseException) -> RedisUnreachable:
    url = get_settings().redis_url_masked
    return RedisUnreachable(
        f"Redis at {url} does not answer ({error}); start it (`cellama up` does), or set CELLAMA_REDIS_URL"
    )
