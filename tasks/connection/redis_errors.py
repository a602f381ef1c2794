"""Detect temporary Redis errors, convert errors for callers, and reject servers that cellama can't use.

A master that is full, busy, loading, read-only or short of replicas will accept the same command later. Most of these
replies are command errors in redis-py, so neither redis-py nor kombu nor Celery waits and retries. In cellama,
connections raise connection errors for these replies instead (`RefusedForNow`). So code that waits for an unreachable
Redis also waits after such a reply.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu.exceptions import OperationalError
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError as RedisConnectionError,
    MasterDownError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
    TryAgainError,
)

from cellama.config import get_settings, mask_url
from cellama.config.local_redis import LOOPBACK_HOSTS, URL_FILE, redis_dir, with_stored_password
from cellama.config.logging import event_logger
from cellama.config.redis_url import RedisUrl, parse_redis_url
from cellama.tasks.contract.errors import RedisFull, RedisRefused, RedisUnreachable
from cellama.tasks.contract.keys import write_probe_key

log = event_logger(__name__)

CLUSTER = (
    "CELLAMA_REDIS_URL: the server is a node of a Redis Cluster, where the keys of one job can be on different "
    "nodes; use a single server, or a server with replicas and sentinels (docs/redis.md)"
)
_CLUSTER_ERRORS = (ClusterCrossSlotError, MovedError)
_NO_ANSWER = (RedisConnectionError, RedisTimeoutError, OperationalError)

# redis-py has a class for each of these codes, and removes the code from the message.
_CODES: dict[type[RedisError], str] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
    TryAgainError: "TRYAGAIN",
}
# redis-py has no class for these codes, and leaves them at the start of the message.
_CODES_WITHOUT_CLASS = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")
_PASSING_CODES = (*_CODES.values(), *_CODES_WITHOUT_CLASS)
# If a command of a script is refused, Redis 6 quotes the reply in an error of its own:
# "Error running script (call to f_…): @user_script:12: @user_script: 12: -OOM command not allowed …"
_QUOTED_BY_REDIS_6 = re.compile(r"Error running script .*?: -(?P<reply>[A-Z]+ .*)", re.DOTALL)


class RefusedForNow(RedisConnectionError):
    """Redis answers, but temporarily refuses commands of this kind. `code` is the first word of Redis' reply."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = self.status_code = code  # redis-py has `status_code` since version 8, and no argument before

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def refusal_of(error: RedisError) -> RefusedForNow | None:
    """Return the RefusedForNow to raise instead of an error, or None if a retry would not help."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return RefusedForNow(code, str(error).removeprefix(f"{code} "))
    reply = str(error)
    if quoted := _QUOTED_BY_REDIS_6.match(reply):
        reply = quoted["reply"]
    code, _, text = reply.partition(" ")
    return RefusedForNow(code, text) if code in _PASSING_CODES else None


class _ConvertingReader:
    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except (ResponseError, BusyLoadingError) as error:
            if (refusal := refusal_of(error)) is None:
                raise
            raise refusal from error


class _AsyncConvertingReader:
    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except (ResponseError, BusyLoadingError) as error:
            if (refusal := refusal_of(error)) is None:
                raise
            raise refusal from error


def convert_refusals(redis: Redis) -> Redis:
    """Make this client raise RefusedForNow, and return the client."""
    _adapt(redis.connection_pool, _ConvertingReader)
    return redis


def convert_refusals_async(redis: AsyncRedis) -> AsyncRedis:
    """Make this client raise RefusedForNow, and return the client."""
    _adapt(redis.connection_pool, _AsyncConvertingReader)
    return redis


def convert_refusals_in_channels(transport: Any) -> Any:
    """Make the channels of this kombu transport raise RefusedForNow, and return the transport."""

    class ConvertingChannel(transport.Channel):  # type: ignore[misc]
        def _get_pool(self, asynchronous: bool = False) -> Any:
            return _adapt(super()._get_pool(asynchronous), _ConvertingReader)

    transport.Channel = ConvertingChannel
    return transport


def _adapt(pool: Any, reader: type[Any]) -> Any:
    """Make this pool's new connections read replies with the methods of `reader`, and return the pool.

    New connections without a password to a server on this machine also use the password of the Redis server that
    `cellama up` runs.
    """
    original = pool.connection_class
    pool.connection_class = type(f"Converting{original.__name__}", (reader, original), {})
    options = pool.connection_kwargs
    has_credentials = any(options.get(name) for name in ("credential_provider", "username", "password"))
    if not has_credentials and (provider := local_password(options.get("host"), options.get("port"))):
        options["credential_provider"] = provider
    return pool


def local_password(host: str | None, port: int | None) -> CredentialProvider | None:
    """Return a provider for the password of the Redis server that `cellama up` runs, or None if the host is remote."""
    return LocalPassword(port) if host in LOOPBACK_HOSTS and port is not None else None


class LocalPassword(CredentialProvider):
    """The password of the Redis server that `cellama up` runs on a port.

    The password is read for each connection, because a client may be created before the server first starts.
    """

    def __init__(self, port: int) -> None:
        self._server = RedisUrl("server", ((LOOPBACK_HOSTS[0], port),))

    def get_credentials(self) -> Any:
        """Return a tuple with the password, which is empty if `cellama up` has not started a server on this port."""
        password = with_stored_password(self._server, get_settings().data_dir).password
        return () if password is None else (password,)

    async def get_credentials_async(self) -> Any:
        """Return the same as `get_credentials`. Reading the password file may block, but the file is tiny and local."""
        return self.get_credentials()


def probe_writes(redis: Redis) -> None:
    """Raise RefusedForNow if Redis refuses writes now. The probe writes zero bytes, so no data changes."""
    redis.setrange(write_probe_key(), 0, "")


class UnfitRedis(Exception):
    """The Redis server doesn't meet cellama's requirements. The message states the reason."""


class ServerCheck:
    """Checks the Redis server once per worker, when the worker starts or when Redis first answers.

    A Redis Cluster node is rejected. Settings that can make the server lose jobs are logged as warnings.
    """

    def __init__(self) -> None:
        self._done = False

    def run(self, redis: Redis) -> None:
        """Check the server once, and log warnings. Raises UnfitRedis if the server is a node of a cluster."""
        if self._done:
            return
        try:
            info: Any = redis.info()
        except (RedisConnectionError, RedisTimeoutError):
            return  # the next call checks again
        except RedisError as error:
            log.warning("Redis settings not checked", detail=f"the Redis command INFO failed: {error}")
            info = {}
        self._done = True
        if info.get("cluster_enabled"):
            raise UnfitRedis(CLUSTER)
        for problem in problems_of(info):
            log.warning("Redis may lose jobs", detail=problem)


def problems_of(info: dict[str, Any]) -> list[str]:
    """Describe each setting that may cause Redis to lose jobs. `info` is the reply to INFO."""
    problems = []
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        problems.append(
            f"maxmemory-policy is {policy}, so Redis evicts jobs, results and streams when its memory is full; "
            "set it to noeviction"
        )
    if not info.get("aof_enabled", 1):
        problems.append(
            "appendonly is no, so a crash or restart of Redis loses the jobs since its last snapshot, or all jobs; "
            "set it to yes"
        )
    return problems


def is_passing(error: RedisError) -> bool:
    """Return whether a retry may succeed, because Redis is unreachable or temporarily refuses commands."""
    return isinstance(error, _NO_ANSWER)


@contextmanager
def reaching_redis(url: str | None = None, job_id: str | None = None) -> Iterator[None]:
    """Convert the errors that Redis clients raise in this block.

    Raises RedisUnreachable if Redis does not answer or temporarily refuses commands, RedisFull if it is full, and
    RedisRefused if it refuses a command permanently. The messages contain `url`, or by default `redis_url`, without its
    password. `job_id` is the id of the job that is queued in the block.
    """
    try:
        yield
    except AuthenticationError as error:
        raise credentials_refused(error, url) from None
    except _NO_ANSWER as error:
        if isinstance(error.__cause__, AuthenticationError):  # raised by kombu
            raise credentials_refused(error.__cause__, url) from None
        raise _unreachable(error, url, job_id) from None
    except ResponseError as error:
        raise _refused(error, url) from None
    except RuntimeError as error:  # raised by Celery's result backend after its retries
        if isinstance(error.__cause__, AuthenticationError):
            raise credentials_refused(error.__cause__, url) from None
        if not isinstance(error.__cause__, _NO_ANSWER):
            raise
        raise _unreachable(error.__cause__, url, job_id) from None


def _refused(error: ResponseError, url: str | None) -> RedisRefused:
    if isinstance(error, _CLUSTER_ERRORS):
        return RedisRefused(CLUSTER)
    return RedisRefused(f"Redis at {_masked(url)} refused a command: {error}")


def credentials_refused(error: AuthenticationError, url: str | None = None) -> RedisRefused:
    """Return the error for a Redis server that requires a password, or a different password."""
    source = "CELLAMA_REDIS_URL" if url is None else "the url"
    settings = get_settings()
    refused = f"Redis at {_masked(url)} refused the connection"
    forms = "redis://:PASSWORD@HOST:PORT/0 or redis://USER:PASSWORD@HOST:PORT/0"
    where = parse_redis_url(settings.redis_url if url is None else url)
    if where.credentials:
        return RedisRefused(f"{refused} ({error}): the credentials in {source} are wrong; correct them: {forms}")
    if with_stored_password(where, settings.data_dir) != where:
        password_file = redis_dir(settings.data_dir) / URL_FILE
        return RedisRefused(
            f"{refused} ({error}): it is not the Redis that `cellama up` last started, whose password is in "
            f"{password_file}; stop this server, or delete that file to use this server"
        )
    return RedisRefused(f"{refused}: it requires a password; add the password to the URL: {forms}")


def _unreachable(error: BaseException, url: str | None, job_id: str | None) -> RedisUnreachable | RedisFull:
    shown = _masked(url)
    refusal = error if isinstance(error, RefusedForNow) else error.__cause__  # kombu raises its own error from it
    if not isinstance(refusal, RefusedForNow):
        remedy = (
            "start it, for example with `cellama up`, or set CELLAMA_REDIS_URL"
            if url is None
            else "start it, or correct the url"
        )
        message = f"Redis at {shown} does not answer ({error}); {remedy}"
        if job_id is not None and not _failed_to_connect(error):
            message += (
                f"; job {job_id} may have been queued: to queue it exactly once, call apply_async with "
                f"task_id={job_id!r}, or repeat the call with the same idempotency key"
            )
    elif refusal.code == "OOM":
        return RedisFull(
            f"Redis at {shown} is full: it has reached its maxmemory; raise maxmemory, or wait until results and "
            "events of earlier jobs have expired"
        )
    else:
        message = f"Redis at {shown} temporarily refuses commands ({refusal}); retry later"
    unreachable = RedisUnreachable(message)
    unreachable.job_id = job_id
    return unreachable


def _failed_to_connect(error: BaseException) -> bool:
    """Return whether Redis received no command, because there was no connection."""
    return isinstance(error.__context__, (ConnectionRefusedError, FileNotFoundError, socket.gaierror))


def _masked(url: str | None) -> str:
    return get_settings().redis_url_masked if url is None else mask_url(url)
