"""Test authentication by API key: formats, expiry, rights, limits, and a gateway without keys."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from cellama.api.http.auth import Caller, LoopbackOnly, NoKeys, is_loopback
from cellama.api.http.errors import ApiError
from cellama.api.http.keys import key_access
from cellama.api.http.keys.access import KeyAccess, duration
from cellama.api.http.keys.limiter import MAX_CALLS
from cellama.api.keys.entry import KeyEntry, KeyText, new_key
from cellama.api.keys.managing import as_toml
from cellama.api.keys.store import KeyFile, KeyStore
from cellama.config import SettingsError, get_settings
from cellama.tasks.contract.keys import api_keys_key, api_keys_used_key

from .conftest import Run, key_and_entry

NOW = datetime.now(UTC)


def bearer(key: KeyText) -> dict[str, str]:
    return {"authorization": f"Bearer {key.text}"}


async def stored(redis: Redis, **fields: Any) -> tuple[KeyText, KeyEntry]:
    key, entry = key_and_entry(**fields)
    await KeyStore(redis).write(entry)
    return key, entry


async def refusal(awaited: Awaitable[Any]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await awaited
    return raised.value


def test_caller_has_the_tenant_and_rights_of_its_key(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        key, entry = await stored(redis, tenant="acme", models=["tiny"], priority="flex")
        for headers in (bearer(key), {"x-api-key": key.text}):
            caller = await KeyAccess(redis).authenticate(headers)
            found = (caller.tenant, caller.key_id, caller.models, caller.priority)
            assert found == ("acme", entry.id, frozenset({"tiny"}), "flex")

    run(scenario)


def test_concurrent_key_checks_are_batched(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[Pipeline] = []
    ask_time = Pipeline.time

    def counted(pipeline: Pipeline) -> Any:
        questions.append(pipeline)
        return ask_time(pipeline)

    monkeypatch.setattr(Pipeline, "time", counted)  # each batch calls TIME once; Redis also counts calls of others

    async def scenario(redis: Redis) -> None:
        key, _ = await stored(redis, tenant="acme", requests_per_minute=600)
        access = KeyAccess(redis)
        callers = await asyncio.gather(*(access.authenticate(bearer(key)) for _ in range(1000)))
        assert {caller.tenant for caller in callers} == {"acme"}
        assert 1 <= len(questions) <= 1000 / MAX_CALLS + 2
        awaited = asyncio.gather(*map(access.admit, callers), return_exceptions=True)
        assert [type(answer) for answer in await awaited].count(ApiError) == 400
        assert not redis.connection_pool._in_use_connections
        assert len(redis.connection_pool._available_connections) <= 2  # a second one for the time of last use

    run(scenario)


HOSTILE: list[Callable[[KeyText], Mapping[str, str]]] = [
    lambda key: {},
    lambda key: bearer(new_key()),
    lambda key: {"authorization": f"Bearer {key.text[:-1]}{'a' if key.text[-1] != 'a' else 'b'}"},
    lambda key: {"authorization": f"Basic {key.text}"},
    lambda key: {"authorization": "Bearer sk-" + "x" * 1_000_000},
    lambda key: {"authorization": "Bearer Ã©\x00\udce9"},
    lambda key: {"x-api-key": key.id},
    lambda key: {"x-api-key": key.digest},
    lambda key: {"x-api-key": f"sk-{key.id}-"},
    lambda key: {"x-api-key": key.text.upper()},
]


@pytest.mark.parametrize("headers_of", HOSTILE)
def test_invalid_key_error_contains_a_remedy_but_not_the_key(
    run: Run, headers_of: Callable[[KeyText], Mapping[str, str]]
) -> None:
    async def scenario(redis: Redis) -> None:
        key, _ = await stored(redis)
        error = await refusal(KeyAccess(redis, keyless=NoKeys()).authenticate(headers_of(key)))
        assert (error.status, error.code, error.headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        assert "cellama keys create" in error.message
        assert len(error.message) < 200
        assert await redis.hlen(api_keys_used_key()) == 0

    run(scenario)


def test_key_is_rejected_as_soon_as_it_expires_or_is_revoked(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        access, hour = KeyAccess(redis), timedelta(hours=1)
        key, entry = await stored(redis, expires_at=NOW + hour)
        await access.authenticate(bearer(key))
        for field, at in (("expires_at", NOW - hour), ("revoked_at", NOW)):
            await KeyStore(redis).write(entry.model_copy(update={field: at}))
            error = await refusal(access.authenticate(bearer(key)))
            assert error.status == 401
            assert f"{entry.id} is {field.removesuffix('_at').replace('expires', 'expired')}" in error.message

    run(scenario)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b'{"id": 1}', "more"])
def test_damaged_or_newer_key_entry_is_rejected(run: Run, damage: bytes | str) -> None:
    async def scenario(redis: Redis) -> None:
        key, entry = await stored(redis)
        stored_value = entry.model_dump_json()[:-1] + ',"new_limit":1}' if damage == "more" else damage
        await redis.hset(api_keys_key(), entry.id, stored_value)  # type: ignore[misc]
        assert (await refusal(KeyAccess(redis, keyless=NoKeys()).authenticate(bearer(key)))).status == 401

    run(scenario)


def test_last_use_of_a_key_is_recorded(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        key, entry = await stored(redis)
        for at, expected in ((0.0, "new"), (NOW.timestamp() + 3600, "same"), (NOW.timestamp() - 70, "new")):
            await redis.hset(api_keys_used_key(), entry.id, str(at))  # type: ignore[misc]
            await KeyAccess(redis).authenticate(bearer(key))
            [found] = await KeyStore(redis).all()
            assert found.used_at is not None
            assert (found.used_at == at) == (expected == "same")

    run(scenario)


def test_last_use_time_of_deleted_keys_is_deleted(run: Run, tmp_path: Path) -> None:
    path, (in_file, entry) = tmp_path / "keys.toml", key_and_entry()
    path.write_text(as_toml(entry))

    async def scenario(redis: Redis) -> None:
        in_redis, _ = await stored(redis)
        long_ago, lately = (str(NOW.timestamp() - days * 86_400) for days in (31, 29))
        used: Any = {"gone": long_ago, "elsewhere": lately, in_file.id: long_ago, in_redis.id: long_ago}
        await redis.hset(api_keys_used_key(), mapping=used)  # type: ignore[misc]
        await KeyAccess(redis, KeyFile(path)).authenticate(bearer(in_file))
        remaining: Any = await redis.hgetall(api_keys_used_key())  # type: ignore[misc]
        assert {key_id.decode() for key_id in remaining} == {"elsewhere", in_file.id, in_redis.id}
        assert float(remaining[in_file.id.encode()]) > float(lately)

    run(scenario)


def test_key_returns_403_for_models_and_adapters_that_it_does_not_allow(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        key, _ = await stored(redis, models=["tiny"], adapters=["pirate"])
        caller = await KeyAccess(redis).authenticate(bearer(key))
        with pytest.raises(ApiError) as model:
            caller.check_model("big")
        assert (model.value.status, model.value.code, model.value.param) == (403, "model_not_allowed", "model")
        with pytest.raises(ApiError) as adapter:
            caller.check_adapters("poet")
        found = (adapter.value.status, adapter.value.code, adapter.value.param)
        assert found == (403, "adapter_not_allowed", "adapters")

    run(scenario)


def test_rate_limit_headers_and_errors_have_the_formats_that_clients_expect(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        key, entry = await stored(redis, requests_per_minute=1, tokens_per_minute=100)
        access = KeyAccess(redis)
        caller = await access.authenticate(bearer(key))
        admission = await access.admit(caller)
        await admission.reserve(40)
        headers = dict(admission.headers)
        for unit in ("requests", "tokens"):
            reset_at = datetime.fromisoformat(headers.pop(f"anthropic-ratelimit-{unit}-reset"))
            assert timedelta(0) < reset_at - datetime.now(UTC) <= timedelta(seconds=61)
            for part in ("limit", "remaining"):
                assert headers.pop(f"anthropic-ratelimit-{unit}-{part}") == headers[f"x-ratelimit-{part}-{unit}"]
        assert headers == {
            "x-ratelimit-limit-requests": "1",
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1m0s",
            "x-ratelimit-limit-tokens": "100",
            "x-ratelimit-remaining-tokens": "60",
            "x-ratelimit-reset-tokens": "1m0s",
        }
        await admission.end(10)
        await admission.end(10)
        error = await refusal(access.admit(caller))
        assert (error.status, error.code) == (429, "rate_limit_exceeded")
        wait_ms = int(error.headers["retry-after-ms"])
        assert 0 < wait_ms <= 60_000
        assert int(error.headers["retry-after"]) == math.ceil(wait_ms / 1000)
        assert error.headers["x-ratelimit-remaining-tokens"] == "90"
        assert f"{entry.id} is at its limit: 1 of 1 requests" in error.message
        await KeyStore(redis).write(entry.model_copy(update={"requests_per_minute": 2}))
        again = await access.admit(await access.authenticate(bearer(key)))
        hopeless = await refusal(again.reserve(101))
        assert (hopeless.status, hopeless.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in hopeless.headers

    run(scenario)


def test_unused_reserved_tokens_are_returned_when_request_ends(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        key, _ = await stored(redis, tokens_per_minute=100)
        access = KeyAccess(redis)
        caller = await access.authenticate(bearer(key))
        first = await access.admit(caller)
        await first.reserve(80)
        second = await access.admit(caller)
        assert "80 of 100 tokens per minute are used" in (await refusal(second.reserve(30))).message
        await second.end(0)
        await first.end(10)
        third = await access.admit(caller)
        await third.reserve(90)
        assert third.headers["x-ratelimit-remaining-tokens"] == "0"

    run(scenario)


def test_job_is_settled_when_its_request_is_cancelled(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        key, _ = await stored(redis, concurrent_jobs=1)
        access = KeyAccess(redis)
        caller = await access.authenticate(bearer(key))
        admission = await access.admit(caller)
        assert "1 jobs at the same time" in (await refusal(access.admit(caller))).message
        ending = asyncio.create_task(admission.end(1))
        await asyncio.sleep(0)
        ending.cancel()
        await admission.end(1)
        await access.admit(caller)

    run(scenario)


def test_gateway_without_keys_accepts_local_requests_and_rejects_proxied_requests(run: Run) -> None:
    here = {"host": "127.0.0.1:8000"}

    async def scenario(redis: Redis) -> None:
        access = KeyAccess(redis, keyless=LoopbackOnly())
        for headers in (here, {**here, "authorization": "Bearer none"}):
            caller = await access.authenticate(headers)
            assert caller == Caller()
        admission = await access.admit(caller)
        await admission.reserve(10**9)
        assert admission.headers == {}
        wrong = ({"host": "evil.example"}, {"host": "["}, {"host": "127.0.0.1.evil.example"}, {"host": ""}, {})
        for headers in (*wrong, {**here, "x-forwarded-for": "203.0.113.7"}):
            assert (await refusal(access.authenticate(headers))).status == 403
        assert (await refusal(KeyAccess(redis).authenticate(here))).status == 401

    run(scenario)


def test_gateway_still_requires_a_key_when_redis_has_lost_its_keys(run: Run) -> None:
    async def scenario(redis: Redis) -> None:
        access = KeyAccess(redis, keyless=NoKeys())
        await access.authenticate({})
        key, _ = await stored(redis)
        assert (await refusal(access.authenticate({}))).status == 401
        assert (await access.authenticate(bearer(key))).tenant == "acme"
        await redis.flushdb()
        for headers in ({}, bearer(key)):
            assert (await refusal(access.authenticate(headers))).status == 401

    run(scenario)


def test_only_keys_of_the_key_file_are_valid(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("keys = []")

    async def scenario(redis: Redis) -> None:
        elsewhere, _ = await stored(redis)
        access = KeyAccess(redis, KeyFile(path), keyless=NoKeys())
        key, entry = key_and_entry(tenant="file", requests_per_minute=1)
        for headers in ({}, bearer(elsewhere), bearer(key)):
            assert (await refusal(access.authenticate(headers))).status == 401
        path.write_text(as_toml(entry))
        caller = await access.authenticate(bearer(key))
        assert caller.tenant == "file"
        await access.admit(caller)
        assert (await refusal(access.admit(caller))).status == 429
        assert (await refusal(access.authenticate(bearer(elsewhere)))).status == 401

    run(scenario)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "localhost.example.com"])
def test_gateway_rejects_public_address_when_no_key_exists(
    run: Run, url: str, settings_environment: Callable[..., None], host: str
) -> None:
    settings_environment(redis_url=url)
    with pytest.raises(SettingsError, match="cellama keys create"):
        key_access(get_settings(), host)
    run(stored)
    key_access(get_settings(), host)
    assert not is_loopback(host)


def test_gateway_rejects_all_requests_when_redis_is_unreachable(
    settings_environment: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    settings_environment(redis_url="redis://127.0.0.1:1/0")
    access = key_access(get_settings(), "0.0.0.0")
    assert "API keys not read" in caplog.text
    assert asyncio.run(refusal(access.authenticate({}))).status == 503


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_address_does_not_require_a_key(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.02, "20ms"), (1, "1s"), (1.5, "1.5s"), (59.9999, "1m0s"), (60, "1m0s"), (360.25, "6m0.25s")],
)
def test_duration_has_openai_format(seconds: float, text: str) -> None:
    assert duration(seconds) == text
