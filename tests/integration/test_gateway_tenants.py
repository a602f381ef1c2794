"""Access, limits and isolation of tenants, with OpenAI's client and a real gateway with keys."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from redis import Redis

from cellama.api.keys.entry import KeyEntry, KeyText, new_key
from cellama.api.keys.managing import as_toml
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import key_charges_key, key_jobs_key

from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from ..gateways import GatewayProcess

STORY = "Once upon a time"


class Keyed:
    """A gateway with a file of keys, to which tests add keys."""

    def __init__(self, folder: Path, redis_url: str, **settings: str) -> None:
        self._path = folder / "keys.toml"
        self.entries: dict[str, KeyEntry] = {}
        self._write()
        self.process = GatewayProcess(folder, redis_url, CELLAMA_GATEWAY_KEYS_FILE=str(self._path), **settings)

    def add(self, **fields: Any) -> KeyText:
        key = new_key()
        fields = {"tenant": f"t{uuid.uuid4().hex[:8]}", **fields, "id": key.id, "digest": key.digest}
        self.entries[key.id] = KeyEntry.model_validate(fields)
        self._write()
        return key

    def revoke(self, key: KeyText) -> None:
        del self.entries[key.id]
        self._write()

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text("\n".join(map(as_toml, self.entries.values())) or "keys = []")
        new.replace(self._path)

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.process.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def keyed(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Keyed]:
    keyed = Keyed(tmp_path_factory.mktemp("keyed"), redis_server.url)
    try:
        keyed.process.wait_ready()
        yield keyed
    finally:
        code = keyed.process.stop()
    assert code == 0, keyed.process.log()
    assert "Traceback" not in keyed.process.log()
    assert "sk-" not in keyed.process.log()


Connect = Callable[..., openai.OpenAI]


@pytest.fixture
def connect(keyed: Keyed) -> Iterator[Connect]:
    """Return a function that creates a key and returns a client with it."""
    opened: list[openai.OpenAI] = []

    def connect(key: KeyText | None = None, **fields: Any) -> openai.OpenAI:
        opened.append(keyed.client((key or keyed.add(**fields)).text))
        return opened[-1]

    yield connect
    for client in opened:
        client.close()


def complete(client: openai.OpenAI, **params: Any) -> Any:
    params = {"model": "tiny", "prompt": STORY, "max_tokens": 4, "temperature": 0, **params}
    return client.completions.create(**params)


WRONG_KEYS = {"none": "none", "malformed": "sk-wrong", "unknown": new_key().text, "long": "sk-" + "x" * 5000}


@pytest.mark.parametrize("key", WRONG_KEYS.values(), ids=WRONG_KEYS)
def test_openai_client_raises_authentication_error_for_a_wrong_key(keyed: Keyed, key: str) -> None:
    with keyed.client(key) as client:
        for call in (lambda: complete(client), client.models.list):
            with pytest.raises(openai.AuthenticationError) as raised:
                call()
            assert raised.value.code == "invalid_api_key"
            assert raised.value.response.headers["www-authenticate"] == "Bearer"


def test_key_is_accepted_in_both_headers_until_it_is_revoked(keyed: Keyed) -> None:
    key = keyed.add()
    ways = ({"x-api-key": key.text}, {"authorization": f"Bearer {key.text}"})
    assert [keyed.process.get("/v1/models", headers=headers).status_code for headers in ways] == [200, 200]
    with keyed.client(key.text) as client:
        assert complete(client).choices[0].text
        keyed.revoke(key)
        with pytest.raises(openai.AuthenticationError):
            complete(client)
    refused = [keyed.process.get("/v1/models", headers=headers).status_code for headers in (*ways, {})]
    assert refused == [401, 401, 401]


def test_anthropic_client_works_or_raises_its_own_exceptions(keyed: Keyed) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": STORY}]}
    key = keyed.add(models=["tiny"])
    with anthropic.Anthropic(base_url=keyed.process.url, api_key=key.text, max_retries=0) as client:
        assert client.messages.create(**asked).content
        with pytest.raises(anthropic.PermissionDeniedError):
            client.messages.create(**{**asked, "model": "other"})
        with pytest.raises(anthropic.AuthenticationError) as raised:
            client.with_options(api_key="sk-wrong").messages.create(**asked)
    body: Any = raised.value.body
    assert body["error"]["type"] == "authentication_error"


def test_expired_key_is_reported_as_expired(connect: Connect) -> None:
    with pytest.raises(openai.AuthenticationError, match="is expired"):
        complete(connect(expires_at="2020-01-01T00:00:00Z"))


def test_model_that_the_key_excludes_is_forbidden_whether_it_exists_or_not(connect: Connect) -> None:
    client = connect(models=["other"])
    assert list(client.models.list()) == []
    for model in ("tiny", "nonsense", ":default"):
        with pytest.raises(openai.PermissionDeniedError, match="it may use: other") as raised:
            complete(client, model=model)
        assert raised.value.param == "model"
    with pytest.raises(openai.PermissionDeniedError):
        client.embeddings.create(model="tiny", input="Hi")
    with pytest.raises(openai.NotFoundError):
        complete(client, model="other")
    assert complete(connect(models=[":default"]), model=":default").choices[0].text


def test_responses_have_rate_limit_headers_until_a_rate_limit_error(connect: Connect) -> None:
    client = connect(requests_per_minute=2)
    raw = client.completions.with_raw_response.create(model="tiny", prompt=STORY, max_tokens=2)
    assert raw.headers["x-ratelimit-limit-requests"] == "2"
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    assert raw.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert list(complete(client, stream=True))
    with pytest.raises(openai.RateLimitError) as raised:
        complete(client)
    headers = raised.value.response.headers
    assert raised.value.code == "rate_limit_exceeded"
    assert 0 < int(headers["retry-after-ms"]) <= 60_000
    assert 0 < int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_anthropic_client_receives_its_own_rate_limit_headers(keyed: Keyed) -> None:
    request: Any = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": STORY}]}
    key = keyed.add(requests_per_minute=1, tokens_per_minute=5000)
    with anthropic.Anthropic(base_url=keyed.process.url, api_key=key.text, max_retries=0) as client:
        headers = client.messages.with_raw_response.create(**request).headers
        with pytest.raises(anthropic.RateLimitError) as raised:
            client.messages.create(**request)
    assert headers["anthropic-ratelimit-tokens-limit"] == "5000"
    assert 0 < int(headers["anthropic-ratelimit-tokens-remaining"]) < 5000
    for found in (headers, raised.value.response.headers):
        assert found["anthropic-ratelimit-requests-limit"] == "1"
        assert found["anthropic-ratelimit-requests-remaining"] == "0"
        resets_in = datetime.fromisoformat(found["anthropic-ratelimit-requests-reset"]) - datetime.now(UTC)
        assert abs(resets_in) <= timedelta(seconds=61)
    assert 0 < int(raised.value.response.headers["retry-after"]) <= 60


def charged(redis: Redis, key: KeyText) -> int:
    return int(redis.hget(key_charges_key(key.id), "tokens") or 0)  # type: ignore[arg-type]


def test_tokens_are_charged_according_to_actual_use(keyed: Keyed, connect: Connect, redis_client: Redis) -> None:
    key = keyed.add(tokens_per_minute=1500)
    client = connect(key)
    usage = complete(client, max_tokens=1000, stop=" ").usage
    wait_until(lambda: charged(redis_client, key) == usage.total_tokens, "the charge of one request")
    chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], temperature=0)
    assert chat.usage is not None
    total = usage.total_tokens + chat.usage.total_tokens
    wait_until(lambda: charged(redis_client, key) == total, "the charge of both")
    with pytest.raises(openai.RateLimitError, match="request fewer") as raised:
        complete(client, max_tokens=1600)
    assert raised.value.response.headers["x-should-retry"] == "false"
    assert charged(redis_client, key) == total


def test_abandoned_stream_is_charged_for_its_tokens_and_frees_its_slot(
    keyed: Keyed, connect: Connect, redis_client: Redis, worker: WorkerProcess
) -> None:
    key = keyed.add(concurrent_jobs=1, tokens_per_minute=5000)
    client = connect(key)
    with worker.slowed():
        stream = complete(client, max_tokens=1900, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="1 jobs at the same time"):
            complete(client)
        assert charged(redis_client, key) > 1900
        stream.close()
        wait_until(lambda: redis_client.zcard(key_jobs_key(key.id)) == 0, "the end of the job")
    assert 0 < charged(redis_client, key) < 1900
    with pytest.raises(openai.RateLimitError, match="this request creates 6 jobs"):
        complete(client, prompt=[STORY] * 3, n=2)
    assert complete(client).choices[0].text


def test_tenants_share_neither_prefixes_nor_idempotency_keys(keyed: Keyed, connect: Connect) -> None:
    tenant = f"t{uuid.uuid4().hex[:8]}"
    one, same, other = connect(tenant=tenant), connect(tenant=tenant), connect()
    prompt = " ".join(["The little fox lived in a forest."] * 8) + uuid.uuid4().hex
    cached = []
    for client in (one, same, other):
        usage = complete(client, prompt=prompt).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    ids = [complete(client, extra_headers=headers).id for client in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]


def test_key_sets_the_default_and_highest_service_tier(connect: Connect) -> None:
    client = connect(priority="flex")
    for tier in ("auto", "default", "priority"):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, service_tier=tier
        )
        assert answer.service_tier == "flex"


def test_response_of_another_tenant_is_not_found(connect: Connect) -> None:
    mine, other = connect(), connect()
    answer = mine.responses.create(model="tiny", input=STORY, max_output_tokens=4, background=True)
    wait_until(lambda: mine.responses.retrieve(answer.id).status in ("completed", "incomplete"), "the response")
    asked: list[Callable[[], Any]] = [
        lambda: other.responses.retrieve(answer.id),
        lambda: other.responses.retrieve(answer.id, stream=True),
        lambda: other.responses.cancel(answer.id),
        lambda: other.responses.delete(answer.id),
        lambda: other.responses.input_items.list(answer.id),
        lambda: other.responses.create(model="tiny", input=STORY, previous_response_id=answer.id),
    ]
    for ask in asked:
        with pytest.raises(openai.NotFoundError):
            ask()
    assert mine.responses.retrieve(answer.id).id == answer.id


def test_same_idempotency_key_of_two_tenants_creates_two_responses(connect: Connect) -> None:
    headers = {"Idempotency-Key": "same"}
    ids = {
        client.responses.create(model="tiny", input=STORY, max_output_tokens=4, extra_headers=headers).id
        for client in (connect(), connect())
    }
    assert len(ids) == 2
