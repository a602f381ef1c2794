"""Few errors for the many ways in which Redis does not answer, or says no."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kombu.exceptions import OperationalError
from redis.exceptions import (
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cellama.config import get_settings
from cellama.tasks.contract.errors import RedisFull, RedisRefused, RedisUnreachable

from .server_check import CLUSTER

_CLUSTERED = (ClusterCrossSlotError, ClusterDownError, MovedError)
_NO_ANSWER = (RedisConnectionError, RedisTimeoutError, OperationalError)
_FOR_A_WHILE = (*_NO_ANSWER, ClusterDownError, OutOfMemoryError, ReadOnlyError, TryAgainError)
# Redis 6 quotes them in an error of its own when a script meets them; the last three have no class in any case.
_CODES_FOR_A_WHILE = ("-OOM ", "-READONLY ", "MISCONF ", "NOREPLICAS ", "MASTERDOWN ")


def is_passing(error: RedisError) -> bool:
    """True if Redis takes nothing for a while, whatever it is asked: the same may be asked again later."""
    return isinstance(error, _FOR_A_WHILE) or any(code in str(error) for code in _CODES_FOR_A_WHILE)


@contextmanager
def reaching_redis() -> Iterator[None]:
    """Raises RedisUnreachable when Redis does not answer inside, RedisRefused when it refuses a command.

    Both name its URL without the password.
    """
    try:
        yield
    except AuthenticationError as error:
        raise credentials_refused(error) from None
    except _NO_ANSWER as error:
        if isinstance(error.__cause__, AuthenticationError):  # kombu's
            raise credentials_refused(error.__cause__) from None
        raise _unreachable(error) from None
    except ResponseError as error:
        raise _refused(error) from None
    except RuntimeError as error:  # Celery's result backend, after its retries
        if isinstance(error.__cause__, AuthenticationError):
            raise credentials_refused(error.__cause__) from None
        if not isinstance(error.__cause__, _NO_ANSWER):
            raise
        raise _unreachable(error.__cause__) from None


def _refused(error: ResponseError) -> RedisRefused:
    if isinstance(error, _CLUSTERED):
        return RedisRefused(CLUSTER)
    url, said = get_settings().redis_url_masked, str(error)
    if "OOM command not allowed" in said:  # Redis 6 quotes it in an error of its own when a script meets it
        return RedisFull(
            f"Redis at {url} is full: it has reached its maxmemory and takes nothing more; raise maxmemory, or wait "
            "until results and events of earlier jobs have expired"
        )
    return RedisRefused(f"Redis at {url} refuses: {said}")


def credentials_refused(error: AuthenticationError) -> RedisRefused:
    """Redis answers, and wants a password, or another one."""
    settings = get_settings()
    given = "the credentials in CELLAMA_REDIS_URL are wrong" if "@" in settings.redis_url else "it wants a password"
    return RedisRefused(
        f"Redis at {settings.redis_url_masked} lets nobody in ({error}): {given}; write them into the URL: "
        "redis://:PASSWORD@HOST:PORT/0, or redis://USER:PASSWORD@HOST:PORT/0"
    )


def _unreachable(error: BaseException) -> RedisUnreachable:
    url = get_settings().redis_url_masked
    return RedisUnreachable(
        f"Redis at {url} does not answer ({error}); start it (`cellama up` does), or set CELLAMA_REDIS_URL"
    )
