"""Temporary refusals of Redis in the words of each version, and the logs of an outage."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    ConnectionError as RedisConnectionError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from cellama.api.machine.redis_server import free_port
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import RefusedForNow, reaching_redis, refusal_of
from cellama.tasks.connection.redis_waits import RedisWaits
from cellama.tasks.contract.errors import RedisFull, RedisUnreachable

OOM = "command not allowed when used memory > 'maxmemory'."
IN_REDIS_6 = "Error running script (call to f_68c): @user_script:31: @user_script: 31: "


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfMemoryError(OOM), "OOM"),
        (OutOfMemoryError(f"{OOM} script: f_68c, on @user_script:31."), "OOM"),
        (ResponseError(f"{IN_REDIS_6}-OOM {OOM} "), "OOM"),
        (ReadOnlyError("You can't write against a read only replica."), "READONLY"),
        (ResponseError(f"{IN_REDIS_6}-READONLY You can't write against a read only replica. "), "READONLY"),
        (ResponseError(f"{IN_REDIS_6}-MISCONF Redis is configured to save RDB snapshots, but"), "MISCONF"),
        (BusyLoadingError("Redis is loading the dataset in memory"), "LOADING"),
        (MasterDownError("Link with MASTER is down"), "MASTERDOWN"),
        (ClusterDownError("The cluster is down"), "CLUSTERDOWN"),
        (ResponseError("BUSY Redis is busy running a script."), "BUSY"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots, but"), "MISCONF"),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), "NOREPLICAS"),
        (ResponseError("UNBLOCKED force unblock from blocking operation"), "UNBLOCKED"),
        (ResponseError("LOADING as hiredis gives it"), "LOADING"),
    ],
)
def test_temporary_refusal_is_recognized_for_each_redis_version(error: RedisError, code: str) -> None:
    refusal = refusal_of(error)
    assert refusal is not None
    assert refusal.code == code
    assert str(refusal).startswith(f"{code} ")


@pytest.mark.parametrize(
    "error",
    [
        NoPermissionError("this user has no permissions to run the 'evalsha' command"),
        ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"),
        ResponseError(f"{IN_REDIS_6}WRONGTYPE Operation against a key holding the wrong kind of value"),
        ResponseError("BUSYGROUP Consumer Group name already exists"),
        ResponseError("a text about READONLY and OOM "),
    ],
)
def test_permanent_refusal_is_not_recognized_as_temporary(error: RedisError) -> None:
    assert refusal_of(error) is None


@pytest.mark.parametrize(
    ("code", "expected"), [("OOM", RedisFull), ("BUSY", RedisUnreachable), ("LOADING", RedisUnreachable)]
)
def test_temporary_refusal_raises_a_retryable_error(code: str, expected: type[RedisFull | RedisUnreachable]) -> None:
    with pytest.raises(expected) as raised, reaching_redis():
        raise RefusedForNow(code, "for some reason")
    assert raised.value.retryable


def test_lost_connection_error_names_the_job_that_may_be_queued() -> None:
    with pytest.raises(RedisUnreachable, match="job a may have been queued") as lost, reaching_redis(job_id="a"):
        raise RedisConnectionError("Connection closed by server.")
    assert lost.value.job_id == "a"


def test_failed_connection_error_does_not_mention_a_queued_job() -> None:
    redis = connect(f"redis://127.0.0.1:{free_port()}/0")
    with redis, pytest.raises(RedisUnreachable) as refused, reaching_redis(job_id="a"):
        redis.ping()
    assert "may have been queued" not in str(refused.value)
    assert refused.value.job_id == "a"


def test_outage_is_logged_once_when_it_starts_and_once_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    waits = RedisWaits()
    for waiter in ("the publisher", "the consumer", "the publisher"):
        waits.started(waiter, RefusedForNow("BUSY", "running a script"))
    waits.ended("the publisher")
    waits.ended("a thread that did not wait")
    assert [record.message for record in caplog.records] == [
        "Redis refuses commands (waiter='the publisher'): BUSY running a script; all work that needs Redis is paused"
    ]
    waits.ended("the consumer")
    assert caplog.records[-1].message.startswith("Redis accepts commands again (outage_s=0.")
    with waits.of("a job") as wait:
        wait(TimeoutError("no answer"))
    assert caplog.records[2].message.startswith("Redis does not answer (waiter='a job'): no answer")
    assert len(caplog.records) == 4
