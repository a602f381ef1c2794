"""Test the rights of callers, and the format of errors."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.api.http.auth import Caller
from cellama.api.http.errors import ApiError, of_code, of_job
from cellama.tasks.contract.errors import (
    JobError,
    JobFailed,
    RedisFull,
    RedisRefused,
    RedisUnreachable,
    UnknownModel,
)


@pytest.mark.parametrize(
    ("own", "requested", "given"),
    [
        (None, None, "default"),
        (None, "auto", "default"),
        (None, "flex", "flex"),
        (None, "priority", "priority"),
        ("flex", None, "flex"),
        ("flex", "priority", "flex"),
        ("default", "priority", "default"),
        ("priority", None, "priority"),
        ("priority", "flex", "flex"),
    ],
)
def test_tier_is_not_more_urgent_than_the_callers_tier(own: str | None, requested: str | None, given: str) -> None:
    assert Caller(priority=own).tier(requested) == given


def test_caller_may_use_only_the_models_of_its_key() -> None:
    assert Caller().may_use_model("any")
    assert Caller(models=frozenset({"a"})).may_use_model("a")
    assert not Caller(models=frozenset({"a"})).may_use_model("b")
    with pytest.raises(ApiError) as raised:
        Caller(models=frozenset({"a"})).check_model("x" * 1_000_000)
    assert len(raised.value.message) < 300


@pytest.mark.parametrize(
    "choice", [None, "pirate", "pirate=0.5", ["pirate"], {"pirate": 2}, [["pirate", 1.0]], 7, ["x=y"]]
)
def test_caller_may_use_the_adapters_of_its_key(choice: Any) -> None:
    Caller(adapters=frozenset({"pirate"})).check_adapters(choice)
    Caller().check_adapters("any")


@pytest.mark.parametrize(
    "choice", ["poet", "poet=0", ["pirate", "poet=0.5"], {"pirate": 1, "poet": 2}, [["poet", 1.0]]]
)
def test_caller_may_not_use_adapters_that_its_key_does_not_allow(choice: Any) -> None:
    with pytest.raises(ApiError, match="may not use the adapter 'poet'; it may use: pirate"):
        Caller(adapters=frozenset({"pirate"})).check_adapters(choice)
    with pytest.raises(ApiError, match="it may use: none"):
        Caller(adapters=frozenset()).check_adapters(choice)


def test_unknown_model_has_openai_error_code() -> None:
    error = of_job(UnknownModel("no running worker serves the model 'x'"))
    assert error.status == 404
    assert error.envelope == {
        "error": {
            "message": "no running worker serves the model 'x'",
            "type": "not_found_error",
            "param": None,
            "code": "model_not_found",
        }
    }


@pytest.mark.parametrize("error", [RedisUnreachable, RedisRefused, RedisFull])
def test_redis_errors_hide_the_address_from_clients(error: type[JobError], caplog: pytest.LogCaptureFixture) -> None:
    reason = "Redis at redis://someone:***@10.0.0.1:6379/0 is away"
    assert "10.0.0.1" not in str(of_job(error(reason)).envelope)
    assert reason in caplog.text


def test_retryable_errors_have_a_retry_after_header() -> None:
    assert of_job(RedisUnreachable("away")).headers == {"retry-after": "1", "retry-after-ms": "1000"}
    assert of_code("queue_full", "full", retryable=True).status == 429
    assert ApiError(429, "too many", retry_after_s=12.2).headers == {"retry-after": "13", "retry-after-ms": "12200"}
    assert of_job(JobFailed("decode_failed", "once more")).headers == {}


def test_unknown_error_code_returns_500() -> None:
    assert of_code("not_known_yet", "?").status == 500
    assert of_code("stream_trimmed", "gone").status == 404
    assert of_code("timeout", "late").status == 408
