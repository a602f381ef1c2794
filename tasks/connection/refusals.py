"""Turn replies by which Redis refuses commands for a while into connection errors, on every connection of cellama.

A master that is full, busy, loading, read-only or short of replicas accepts the same command later. redis-py reports
most of these replies as errors of the command, for which neither it nor kombu nor Celery waits. As connection errors
they are waited out by everything that waits out a Redis that does not answer.
"""

from __future__ import annotations

import re
from typing import Any

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError as RedisConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from cellama.tasks.contract.keys import write_probe_key

# redis-py has a class for each of these, and takes the code out of the message.
_CODES: dict[type[RedisError], str] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    BusyLoadingError: "LOADING",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
    TryAgainError: "TRYAGAIN",
}
# It has none for these, and leaves them at the beginning of the message.
_CODES_WITHOUT_A_CLASS = ("BUSY", "MISCONF", "NOREPLICAS", "UNBLOCKED")
_PASSING_CODES = (*_CODES.values(), *_CODES_WITHOUT_A_CLASS)
# Redis 6 quotes the reply in an error of its own if a script's command is refused:
# "Error running script (call to f_…): @user_script:12: @user_script: 12: -OOM command not allowed …"
_QUOTED_BY_REDIS_6 = re.compile(r"Error running script .*?: -(?P<reply>[A-Z]+ .*)", re.DOTALL)


class RefusedForNow(RedisConnectionError):
    """Redis answers, but accepts no command of this kind for a while. `code` is the first word of its reply."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}", status_code=code)
        self.code = code

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def refusal_of(error: RedisError) -> RefusedForNow | None:
    """Return what the error is raised as instead, or None if asking again later would not help."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return RefusedForNow(code, str(error).removeprefix(f"{code} "))
    reply = str(error)
    if quoted := _QUOTED_BY_REDIS_6.match(reply):
        reply = quoted["reply"]
    code, _, text = reply.partition(" ")
    return RefusedForNow(code, text) if code in _PASSING_CODES else None


class _Patient:
    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except (ResponseError, BusyLoadingError) as error:
            if (refusal := refusal_of(error)) is None:
                raise
            raise refusal from error


class _AsyncPatient:
    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except (ResponseError, BusyLoadingError) as error:
            if (refusal := refusal_of(error)) is None:
                raise
            raise refusal from error


def be_patient(redis: Redis) -> Redis:
    """Let this client raise RefusedForNow."""
    _replace_connections(redis.connection_pool, _Patient)
    return redis


def be_patient_async(redis: AsyncRedis) -> AsyncRedis:
    """Let this client raise RefusedForNow."""
    _replace_connections(redis.connection_pool, _AsyncPatient)
    return redis


def be_patient_in_channels(transport: Any) -> Any:
    """Let the channels of this transport of kombu's raise RefusedForNow."""

    class PatientChannel(transport.Channel):  # type: ignore[misc]
        def _get_pool(self, asynchronous: bool = False) -> Any:
            return _replace_connections(super()._get_pool(asynchronous), _Patient)

    transport.Channel = PatientChannel
    return transport


def _replace_connections(pool: Any, reads: type[Any]) -> Any:
    """The connections that this pool makes from now on read replies like that."""
    made = pool.connection_class
    pool.connection_class = type(f"Patient{made.__name__}", (reads, made), {})
    return pool


def probe_writes(redis: Redis) -> None:
    """Raise RefusedForNow if Redis accepts no writes now. The command itself changes nothing: it writes no bytes."""
    redis.setrange(write_probe_key(), 0, "")
