"""Test the records of responses in Redis, and the status of a response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest
from redis import Redis
from starlette.requests import Request

from cellama.api.http.auth import Caller
from cellama.api.http.context import RequestContext
from cellama.api.http.errors import ApiError
from cellama.api.http.gateway import Gateway
from cellama.api.http.parsing import ParsedRequest
from cellama.api.http.responses.creating import parse_response
from cellama.api.http.responses.reading import EVENTS_PER_PAGE, error_frame, frames, status_of
from cellama.api.http.responses.store import ResponseStore, new_id
from cellama.api.http.sse import with_errors
from cellama.api.openai.responses.record import ResponseRecord
from cellama.tasks.contract.errors import StreamTrimmed
from cellama.tasks.contract.keys import (
    context_key,
    job_key,
    journal_key,
    response_key,
    result_key,
    stream_id,
)

from ...openai.responses.journals import ID, JOURNALS, record
from .conftest import Scenario

ACME, OTHER = Caller("acme"), Caller("other")


def write(redis: Redis, journal: Any, first: int = 0) -> None:
    for seq, event in enumerate(journal, first):
        redis.xadd(journal_key("j"), {"event": json.dumps({"seq": seq, **event})}, id=stream_id(seq))


def http_status(raised: pytest.ExceptionInfo[ApiError]) -> int:
    return raised.value.status


def test_create_returns_the_first_record_for_an_idempotency_key_and_sets_its_expiry(run: Any, redis: Redis) -> None:
    async def scenario(gateway: Gateway) -> None:
        records = ResponseStore(gateway)
        first = await records.create(record(digest="a"))
        assert await records.create(record(digest="a", created_at=2000)) == first
        assert await records.read(ID, ACME) == first
        with pytest.raises(ApiError) as raised:
            await records.create(record(digest="b"))
        assert http_status(raised) == 409

    run(scenario)
    assert redis.ttl(response_key(ID)) > 0  # type: ignore[operator]


def test_record_returns_404_when_missing_deleted_or_owned_by_another_tenant(run: Any, redis: Redis) -> None:
    async def scenario(gateway: Gateway) -> None:
        records = ResponseStore(gateway)
        await records.create(record())
        received = []
        for caller, name in ((OTHER, ID), (Caller(), ID), (ACME, "resp_x"), (ACME, new_id(None))):
            with pytest.raises(ApiError) as raised:
                await records.read(name, caller)
            received.append(http_status(raised))
        assert received == [404] * 4
        await records.delete(record())
        await records.create(record(store=False))
        with pytest.raises(ApiError):
            await records.read(ID, ACME)

    run(scenario)


def test_record_returns_404_when_caller_may_not_use_its_model(run: Any) -> None:
    async def scenario(gateway: Gateway) -> None:
        records = ResponseStore(gateway)
        await records.create(record(model=":default"))  # which model that was is unknown
        assert await records.read(ID, Caller("acme", models=frozenset({":default"})))
        with pytest.raises(ApiError) as raised:
            await records.read(ID, Caller("acme", models=frozenset({"tiny"})))
        assert http_status(raised) == 404

    run(scenario)


def test_withdraw_deletes_the_record_but_keeps_the_job(run: Any, redis: Redis) -> None:
    async def scenario(gateway: Gateway) -> None:
        records = ResponseStore(gateway)
        await records.create(record())
        await records.notify_on_end(record())
        await records.withdraw(record())

    redis.hset(job_key("j"), "state", "queued")
    run(scenario)
    assert redis.keys() == [job_key("j").encode()]


def test_new_id_is_the_same_for_the_same_idempotency_key() -> None:
    assert new_id("k") == new_id("k") != new_id("l")
    assert new_id(None) != new_id(None)


def test_record_written_by_a_newer_gateway_is_readable() -> None:
    text = json.dumps({**json.loads(record().to_json()), "colour": "red"})
    assert ResponseRecord.of_json(text) == record()


@pytest.mark.parametrize("name", JOURNALS)
def test_status_is_derived_from_the_journal(run: Any, redis: Redis, name: str) -> None:
    journal = JOURNALS[name]
    with pytest.raises(ApiError) as raised:
        run(lambda gateway: status_of(gateway, record()))
    assert http_status(raised) == 404
    redis.hset(job_key("j"), "state", "queued")
    assert run(lambda gateway: status_of(gateway, record(background=True))).response["status"] == "queued"
    redis.set(result_key("j"), '{"status": "STARTED"}')  # Celery writes this before the first event
    assert run(lambda gateway: status_of(gateway, record(background=True))).response["status"] == "queued"
    write(redis, journal[:-1])
    if journal[:-1]:
        in_progress = run(lambda gateway: status_of(gateway, record(background=True)))
        assert (in_progress.response["status"], in_progress.has_ended) == ("in_progress", False)
    write(redis, journal[-1:], len(journal) - 1)
    current = run(lambda gateway: status_of(gateway, record(background=True)))
    assert current.has_ended
    assert current.has_all_events
    assert current.finish_key == journal[-1].get("finish_key")


def test_long_journal_is_read_in_pages(run: Any, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = JOURNALS["text"]
    tokens = [{"type": "token", "text": f"{number} ", "tokens": [1]} for number in range(1200)]
    write(redis, [journal[0], *tokens, journal[-1]])
    pages: list[int] = []

    async def scenario(gateway: Gateway) -> Any:
        xrange = gateway.redis.xrange

        async def noted(*args: Any, **options: Any) -> Any:
            found = await xrange(*args, **options)
            pages.append(len(found))
            return found

        monkeypatch.setattr(gateway.redis, "xrange", noted)
        return await status_of(gateway, record())

    current = run(scenario)
    assert current.response["output"][0]["content"][0]["text"] == "".join(token["text"] for token in tokens)
    assert (sum(pages), max(pages)) == (1202, EVENTS_PER_PAGE)


def test_status_comes_from_job_entry_when_events_have_expired(run: Any, redis: Redis) -> None:
    received = []
    for name in ("failed at once", "cancelled"):
        redis.hset(job_key("j"), mapping={"state": "done", "end": json.dumps(JOURNALS[name][-1])})
        current = run(lambda gateway: status_of(gateway, record(background=True)))
        assert (current.has_ended, current.has_all_events) == (True, False)
        received.append(current.response["status"])
    assert received == ["failed", "cancelled"]


def follow(can_follow: bool = True, **fields: Any) -> Scenario:
    """Parse a request for a response that follows the one with the id ID."""
    body = {"model": "tiny", "input": "And?", "previous_response_id": ID, **fields}
    model: Any = {"id": "tiny", "ctx_per_slot": 100, "follows_replies": can_follow}

    async def scenario(gateway: Gateway) -> Any:
        records = ResponseStore(gateway)
        await records.create(record(params={"cache_scope": "acme"}))
        sent = ParsedRequest(Request({"type": "http", "headers": []}), RequestContext(gateway), ACME, body)
        return (await parse_response(sent, model, records)).record

    return scenario


def test_response_continues_context_only_when_the_context_is_unchanged(run: Any, redis: Redis) -> None:
    write(redis, JOURNALS["text"])
    assert run(follow()).parent_key is None  # the context has expired in Redis
    redis.set(context_key("k"), "tokens")
    assert run(follow()).parent_key == "k"
    developer = [{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "And?"}]
    answer = [{"type": "function_call_output", "call_id": "c1", "output": "sun"}]
    others: list[dict[str, Any]] = [
        {"instructions": "Be brief"},
        {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
        {"input": developer},
        {"input": answer},
        {"cache_salt": "s"},
        {"can_follow": False},
    ]
    for other in others:
        record_of_other = run(follow(**other))
        assert (record_of_other.parent_key, record_of_other.previous) == (None, ID)


async def _events(journal: Any, error: Exception | None = None) -> AsyncGenerator[Mapping[str, Any], None]:
    for event in journal:
        yield event
    if error is not None:
        raise error


async def _wait(job_id: str, model: str, tier: str) -> str | None:
    return f"position 2 of {job_id}"


def read(journal: Any, after: int = -1, error: Exception | None = None) -> bytes:
    async def all_of() -> bytes:
        made = frames(record(), _events(journal, error), after, wait_of=_wait)
        return b"".join([frame async for frame in with_errors(made, error_frame)])

    return asyncio.run(all_of())


def test_frames_start_after_the_requested_sequence_number() -> None:
    whole = read(JOURNALS["reasoning"])
    parts = whole.split(b"\n\n")[:-1]
    for after in range(len(parts)):
        rest = b"".join(part + b"\n\n" for part in parts[after + 1 :])
        assert read(JOURNALS["reasoning"], after) == rest
    assert parts[0].startswith(b"event: response.created\ndata: {")


def test_stream_ends_with_unnumbered_error_when_it_cannot_continue() -> None:
    last = read(JOURNALS["text"][:2], error=StreamTrimmed("gone")).split(b"\n\n")[-2]
    received = json.loads(last.removeprefix(b"data: "))
    assert "sequence_number" not in received
    assert received["error"]["code"] == "stream_trimmed"


def test_pings_become_sse_comments() -> None:
    received = read([{"type": "ping"}, *JOURNALS["text"], {"type": "ping"}])
    assert b": position 2 of j\n\n" in received
    assert received.endswith(b": keep-alive\n\n")
