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

from cellama.config import get_settings, mask_url
from cellama.config.local_redis import URL_FILE, redis_dir, with_kept_password
from cellama.config.redis_url import parse_redis_url
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
def reaching_redis(url: str | None = None) -> Iterator[None]:
    """Raises RedisUnreachable when Redis does not answer inside, RedisRefused when it refuses a command.

    Both name its URL, that of the settings unless it is given, without the password.
    """
    try:
        yield
    except AuthenticationError as error:
        raise credentials_refused(error, url) from None
    except _NO_ANSWER as error:
        if isinstance(error.__cause__, AuthenticationError):  # kombu's
            raise credentials_refused(error.__cause__, url) from None
        raise _unreachable(error, url) from None
    except ResponseError as error:
        raise _refused(error, url) from None
    except RuntimeError as error:  # Celery's result backend, after its retries
        if isinstance(error.__cause__, AuthenticationError):
            raise credentials_refused(error.__cause__, url) from None
        if not isinstance(error.__cause__, _NO_ANSWER):
            raise
        raise _unreachable(error.__cause__, url) from None


def _refused(error: ResponseError, url: str | None) -> RedisRefused:
    if isinstance(error, _CLUSTERED):
        return RedisRefused(CLUSTER)
    shown, said = _shown(url), str(error)
    # Redis 6 quotes it in an error of its own when a script meets it.
    if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in said:
        return RedisFull(
            f"Redis at {shown} is full: it has reached its maxmemory and takes nothing more; raise maxmemory, or wait "
            "until results and events of earlier jobs have expired"
        )
    return RedisRefused(f"Redis at {shown} refuses: {said}")


def credentials_refused(error: AuthenticationError, url: str | None = None) -> RedisRefused:
    """Redis answers, and wants a password, or another one."""
    source = "CELLAMA_REDIS_URL" if url is None else "the url"
    settings = get_settings()
    whole = settings.redis_url if url is None else url
    refused = f"Redis at {_shown(url)} lets no client in"
    remedy = "write them into the URL: redis://:PASSWORD@HOST:PORT/0, or redis://USER:PASSWORD@HOST:PORT/0"
    where = parse_redis_url(whole)
    if where.credentials:
        return RedisRefused(f"{refused} ({error}): the credentials in {source} are wrong; {remedy}")
    if with_kept_password(where, settings.data_dir) != where:
        kept = redis_dir(settings.data_dir) / URL_FILE
        return RedisRefused(
            f"{refused} ({error}): it is not the Redis that `cellama up` started last, whose password is in {kept}; "
            "stop this server, or delete that file to use it"
        )
    return RedisRefused(f"{refused}: it wants a password; {remedy}")


def _unreachable(error: BaseException, url: str | None) -> RedisUnreachable:
    remedy = "start it (`cellama up` does), or set CELLAMA_REDIS_URL" if url is None else "start it, or correct the url"
    return RedisUnreachable(f"Redis at {_shown(url)} does not answer ({error}); {remedy}")


def _shown(url: str | None) -> str:
    return get_settings().redis_url_masked if url is None else mask_url(url)
