"""Few errors for the many ways in which Redis does not answer, or says no."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from kombu.exceptions import OperationalError
from redis.exceptions import (
    AuthenticationError,
    ClusterCrossSlotError,
    ConnectionError as RedisConnectionError,
    MovedError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
)

from cellama.config import get_settings, mask_url
from cellama.config.local_redis import URL_FILE, redis_dir, with_kept_password
from cellama.config.redis_url import parse_redis_url
from cellama.tasks.contract.errors import RedisFull, RedisRefused, RedisUnreachable

from .refusals import RefusedForNow
from .server_check import CLUSTER

_CLUSTERED = (ClusterCrossSlotError, MovedError)
_NO_ANSWER = (RedisConnectionError, RedisTimeoutError, OperationalError)


def is_passing(error: RedisError) -> bool:
    """Return whether the same command may succeed later: Redis does not answer, or refuses commands for a while."""
    return isinstance(error, _NO_ANSWER)


@contextmanager
def reaching_redis(url: str | None = None, job_id: str | None = None) -> Iterator[None]:
    """Convert what Redis' clients raise inside.

    Raises RedisUnreachable if Redis does not answer or refuses commands for a while, RedisFull if it is full, and
    RedisRefused if it refuses a command for good. Each names its URL, that of the settings unless it is given, without
    the password. `job_id` is the id of the job that is queued inside.
    """
    try:
        yield
    except AuthenticationError as error:
        raise credentials_refused(error, url) from None
    except _NO_ANSWER as error:
        if isinstance(error.__cause__, AuthenticationError):  # kombu's
            raise credentials_refused(error.__cause__, url) from None
        raise _unreachable(error, url, job_id) from None
    except ResponseError as error:
        raise _refused(error, url) from None
    except RuntimeError as error:  # Celery's result backend, after its retries
        if isinstance(error.__cause__, AuthenticationError):
            raise credentials_refused(error.__cause__, url) from None
        if not isinstance(error.__cause__, _NO_ANSWER):
            raise
        raise _unreachable(error.__cause__, url, job_id) from None


def _refused(error: ResponseError, url: str | None) -> RedisRefused:
    if isinstance(error, _CLUSTERED):
        return RedisRefused(CLUSTER)
    return RedisRefused(f"Redis at {_shown(url)} refuses: {error}")


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


def _unreachable(error: BaseException, url: str | None, job_id: str | None) -> RedisUnreachable | RedisFull:
    shown = _shown(url)
    refusal = error if isinstance(error, RefusedForNow) else error.__cause__  # kombu has errors of its own
    if not isinstance(refusal, RefusedForNow):
        remedy = (
            "start it (`cellama up` does), or set CELLAMA_REDIS_URL" if url is None else "start it, or correct the url"
        )
        what = f"Redis at {shown} does not answer ({error}); {remedy}"
        if job_id is not None and not _is_of_connecting(error):
            what += (
                f"; job {job_id} may be queued all the same: to queue it once, call apply_async with "
                f"task_id={job_id!r}, or repeat the call with the same idempotency key"
            )
    elif refusal.code == "OOM":
        return RedisFull(
            f"Redis at {shown} is full: it has reached its maxmemory and takes nothing more; raise maxmemory, or wait "
            "until results and events of earlier jobs have expired"
        )
    else:
        what = f"Redis at {shown} accepts no commands for now ({refusal}); try again later"
    unreachable = RedisUnreachable(what)
    unreachable.job_id = job_id
    return unreachable


def _is_of_connecting(error: BaseException) -> bool:
    """Whether there was no connection, so that Redis has got nothing."""
    return isinstance(error.__context__, (ConnectionRefusedError, FileNotFoundError, socket.gaierror))


def _shown(url: str | None) -> str:
    return get_settings().redis_url_masked if url is None else mask_url(url)
