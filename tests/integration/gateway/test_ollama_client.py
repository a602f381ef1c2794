"""Ollama's unmodified client with a real gateway and worker."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from ollama import AsyncClient, Client as OllamaClient, ResponseError
from openai import OpenAI

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from ..test_gateway_tenants import Keyed
from .conftest import CHAT, TOOL

QUESTION = CHAT["messages"]
GREEDY = {"temperature": 0, "num_predict": 12}
ASKED: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "options": GREEDY}
WEATHER: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [TOOL],
    "options": {"temperature": 0, "num_predict": 100},
}
DURATIONS = ("load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[OllamaClient]:
    with OllamaClient(host=gateway.url, timeout=PATIENCE_S) as made:
        yield made


def text_of(parts: list[Any]) -> str:
    return "".join(part.message.content or "" for part in parts)


def test_chat_answer_equals_the_result_of_the_same_job(client: OllamaClient, queue: Client) -> None:
    answer = client.chat(**ASKED)
    job = queue.chat("tiny", QUESTION, temperature=0, max_tokens=12).result(PATIENCE_S)
    assert (answer.message.role, answer.message.content) == ("assistant", job["text"])
    usage = job["usage"]
    assert (answer.prompt_eval_count, answer.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (answer.model, answer.done, answer.done_reason) == ("tiny", True, job["finish_reason"])
    assert datetime.fromisoformat(answer.created_at or "").tzinfo is not None
    total = answer.total_duration or 0
    assert abs(sum(answer[name] for name in DURATIONS) - total) <= len(DURATIONS)
    assert (answer.eval_duration or 0) > 0
    assert total < PATIENCE_S * 1e9


def test_streamed_parts_add_up_to_the_answer(client: OllamaClient, gateway: GatewayProcess) -> None:
    whole = client.chat(**ASKED)
    parts = list(client.chat(**ASKED, stream=True))
    assert text_of(parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)
    with gateway.stream("/api/chat", json=ASKED) as streamed:  # streaming is the default
        assert streamed.headers["content-type"] == "application/x-ndjson"
        assert len([json.loads(line) for line in streamed.iter_lines()]) > 2


def test_asyncio_client_streams_answers(gateway: GatewayProcess) -> None:
    async def chat() -> str:
        async with AsyncClient(host=gateway.url, timeout=PATIENCE_S) as client:
            return text_of([part async for part in await client.chat(**ASKED, stream=True)])

    with OllamaClient(host=gateway.url, timeout=PATIENCE_S) as client:
        assert asyncio.run(chat()) == client.chat(**ASKED).message.content


def test_tool_call_and_result_round_trip(client: OllamaClient) -> None:
    answer = client.chat(**WEATHER)
    assert answer.message.tool_calls
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    streamed = [part.message.tool_calls for part in client.chat(**WEATHER, stream=True) if part.message.tool_calls]
    assert streamed == [[call]]
    turns = [
        *WEATHER["messages"],
        answer.message,
        {"role": "tool", "tool_name": "get_weather", "content": "12 degrees"},
    ]
    last = client.chat(**{**WEATHER, "messages": turns})
    assert last.message.content
    assert not last.message.tool_calls


def test_function_can_be_passed_as_a_tool(client: OllamaClient) -> None:
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"sunny in {city}"

    [call] = client.chat(**{**WEATHER, "tools": [get_weather]}).message.tool_calls or ()
    assert get_weather(**call.function.arguments) == "sunny in Paris"


def test_thinking_is_separate_from_the_content(client: OllamaClient) -> None:
    asked = {**ASKED, "options": {"temperature": 0, "num_predict": 60}}
    whole, off = client.chat(**asked, think=True), client.chat(**asked, think=False)
    parts = list(client.chat(**asked, think=True, stream=True))
    assert whole.message.thinking
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    assert text_of(parts) == whole.message.content
    assert (off.message.thinking, off.message.content) == (None, whole.message.content)
    turns = [*QUESTION, whole.message, {"role": "user", "content": "And of Italy?"}]
    assert client.chat(**{**asked, "messages": turns}, think=True).message.content
    generated = client.generate("tiny", QUESTION[0]["content"], think=True, options=asked["options"])
    assert (generated.thinking, generated.response) == (whole.message.thinking, whole.message.content)


def test_answer_conforms_to_the_requested_format(client: OllamaClient) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 2]}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    answer = client.chat("tiny", QUESTION, format=schema, options={"temperature": 0, "num_predict": 100})
    value = json.loads(answer.message.content or "")
    assert isinstance(value["city"], str)
    assert value["n"] in (1, 2)
    started = client.generate("tiny", "Some JSON", format="json", options={"num_predict": 4}).response or ""
    assert started.lstrip().startswith("{")


def test_logprobs_in_stream_parts_match_their_tokens(client: OllamaClient) -> None:
    whole = client.chat(**ASKED, logprobs=True, top_logprobs=2)
    assert whole.logprobs is not None
    assert "".join(entry.token for entry in whole.logprobs) == whole.message.content
    assert {len(entry.top_logprobs or ()) for entry in whole.logprobs} == {2}
    parts = client.chat(**ASKED, logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for part in parts for entry in part.logprobs or ()]
    one, other = (
        [value for entry in found for value in (entry, *(entry.top_logprobs or ()))]
        for found in (streamed, whole.logprobs)
    )
    assert [value.token for value in one] == [value.token for value in other]
    # Batches of other shapes, such as those with drafts, change the last digits.
    assert [value.logprob for value in one] == pytest.approx([value.logprob for value in other], abs=1e-3)


def test_prompt_is_rendered_unless_it_is_raw(client: OllamaClient, queue: Client) -> None:
    prompt = QUESTION[0]["content"]
    assert client.generate("tiny", prompt, options=GREEDY).response == client.chat(**ASKED).message.content
    with_system = client.generate("tiny", prompt, system="Be kind.", options=GREEDY)
    messages = [{"role": "system", "content": "Be kind."}, *QUESTION]
    job = queue.chat("tiny", messages, temperature=0, max_tokens=12).result(PATIENCE_S)
    assert (with_system.response, with_system.prompt_eval_count) == (job["text"], job["usage"]["prompt_tokens"])
    text = queue.generate("tiny", "Once upon a time", temperature=0, max_tokens=12).result(PATIENCE_S)["text"]
    assert client.generate("tiny", "Once upon a time", raw=True, options=GREEDY).response == text
    parts = client.generate("tiny", "Once upon a time", raw=True, options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == text


def test_request_without_prompt_reports_that_the_model_is_loaded(client: OllamaClient) -> None:
    for answer in (client.generate("tiny", keep_alive="1h"), client.generate("tiny:latest"), client.chat("tiny")):
        assert (answer.done, answer.done_reason) == (True, "load")
    with pytest.raises(ResponseError, match=r"keep_alive is 0, .* run `cellama models unload`"):
        client.generate("tiny", keep_alive=0)
    assert client.embed("tiny", "").embeddings == []
    assert client.embeddings("tiny", "").embedding == []


def test_embeddings_equal_the_embeddings_of_the_openai_endpoint(client: OllamaClient, openai: OpenAI) -> None:
    vectors = openai.embeddings.create(model="tiny", input=["a fox", "a bear"], encoding_format="float")
    expected = [one.embedding for one in vectors.data]
    answer = client.embed("tiny", ["a fox", "a bear"])
    assert answer.embeddings == expected
    assert (answer.prompt_eval_count or 0) > 2
    assert (answer.total_duration or 0) > 0
    assert client.embed("tiny", "a fox").embeddings == expected[:1]
    assert client.embeddings("tiny", "a bear").embedding == expected[1]
    assert [len(vector) for vector in client.embed("tiny", ["a fox"], dimensions=8).embeddings] == [8]
    assert client.embed("tiny", "word " * 3000).embeddings
    with pytest.raises(ResponseError) as refused:
        client.embed("tiny", "word " * 3000, truncate=False)
    assert refused.value.status_code == 400


def test_models_are_listed_and_described(client: OllamaClient, gateway: GatewayProcess) -> None:
    [listed] = client.list().models
    [running] = client.ps().models
    assert listed.model == running.model == "tiny:latest"
    assert listed.digest == running.digest
    assert listed.modified_at is not None
    assert (listed.size or 0) > 1e6
    assert listed.details is not None
    assert listed.details.family == "llama"
    assert (running.context_length, (running.size or 0) > 1e6) == (2048, True)
    assert running.expires_at is not None
    assert running.expires_at.year > 2200
    for name in ("tiny", "tiny:latest"):
        shown = client.show(name)
        assert shown.modelinfo is not None
        assert shown.modelinfo["llama.context_length"] == 2048
        assert set(shown.capabilities or ()) == {"completion", "embedding", "tools", "thinking"}
        assert "num_ctx" in (shown.parameters or "")
        assert client.chat(**{**ASKED, "model": name}).model == name
    assert gateway.post("/api/show", json={"name": "tiny"}).status_code == 200
    assert gateway.get("/api/version").json()["version"][0].isdecimal()
    assert httpx.head(gateway.url).status_code == 200


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/chat", {**ASKED, "model": "nope"}, 404, "'nope' is not served; running models: tiny"),
        ("/api/chat", {**ASKED, "model": "nope:latest"}, 404, "'nope' is not served"),
        ("/api/show", {"model": "nope"}, 404, "'nope' is not served"),
        ("/api/embed", {"model": "nope", "input": "a"}, 404, "'nope' is not served"),
        ("/api/chat", {"messages": QUESTION}, 400, "model is None"),
        ("/api/chat", {**ASKED, "options": {"temperature": "hot"}}, 400, "options.temperature is 'hot'"),
        ("/api/chat", {**ASKED, "options": {"temperature": float("nan")}}, 400, "options.temperature is nan"),
        ("/api/chat", {**ASKED, "options": {"num_predict": 0}}, 400, "options.num_predict is 0"),
        ("/api/chat", {**ASKED, "options": {"num_predict": 10**30}}, 400, "options.num_predict is"),
        ("/api/chat", {**ASKED, "options": {"model": "x"}}, 400, "unknown option 'model'"),
        ("/api/chat", {**ASKED, "stream": "yes"}, 400, "stream is 'yes'; it must be true or false"),
        ("/api/chat", {**ASKED, "foo": 1}, 400, "unknown parameter 'foo'"),
        ("/api/chat", {**ASKED, "format": {"type": "objekt"}}, 400, "format at #"),
        ("/api/chat", {**ASKED, "stream": False, "format": {"type": "objekt"}}, 400, "format at #"),
        ("/api/chat", {**ASKED, "tools": [{"type": "web"}]}, 400, "tools.0"),
        ("/api/chat", {**ASKED, "messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, 400, "only"),
        ("/api/chat", {**ASKED, "messages": [{"role": "user", "content": "\ud800"}]}, 400, "messages.0"),
        ("/api/chat", {**ASKED, "messages": [{"role": "robot", "content": "a"}]}, 400, "messages.0.role is 'robot'"),
        ("/api/chat", {**ASKED, "messages": [3]}, 400, "messages.0"),
        ("/api/chat", {**ASKED, "messages": [{"role": "user", "content": "x " * 9000}]}, 400, "the prompt is too long"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "template": "{{ .Prompt }}"}, 400, "set `raw`"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "context": [1]}, 400, "conversation to `/api/chat`"),
        ("/api/generate", {"model": "tiny", "prompt": "a", "images": ["aGk="]}, 400, "models can only process text"),
        ("/api/generate", {"model": "tiny", "prompt": 3}, 400, "prompt is 3; it must be a string"),
        ("/api/embed", {"model": "tiny", "input": [1]}, 400, "input is [1]"),
        ("/api/embed", {"model": "tiny", "input": ["a", ""]}, 400, "input.1 is ''"),
        ("/api/embed", {"model": "tiny", "input": "a", "dimensions": 0}, 400, "dimensions is 0"),
        ("/api/pull", {"model": "llama3.2"}, 400, "load the model on the workers with `cellama models load`"),
        ("/api/push", {"model": "me/mine"}, 400, "`cellama models load`"),
        ("/api/create", {"model": "mine", "from": "tiny"}, 400, "--set NAME=VALUE`"),
        ("/api/copy", {"source": "tiny", "destination": "mine"}, 400, "under the new name"),
        ("/api/blobs/sha256:00", {}, 400, "copy the file to the workers"),
        ("/api/nothing", {}, 404, "/api/nothing: Not Found"),
        ("/api/tags", {}, 405, "/api/tags: Method Not Allowed"),
    ],
)  # fmt: skip
def test_error_has_ollamas_format(
    gateway: GatewayProcess, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    answer = gateway.post(path, content=json.dumps(body), headers=JSON)
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b"\xff", JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {**JSON, "content-encoding": "gzip"}, 415),
    ],
)
def test_malformed_body_gets_an_error_in_ollamas_format(
    gateway: GatewayProcess, content: bytes, headers: dict[str, str], status: int
) -> None:
    for path in ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"):
        answer = gateway.post(path, content=content, headers=headers)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])


def test_body_requires_a_content_type_only_in_cross_site_requests(gateway: GatewayProcess) -> None:
    content, by_page = json.dumps({**ASKED, "stream": False}), {"origin": "http://evil.example"}
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded"}):  # litellm and curl
        assert gateway.post("/api/chat", content=content, headers=headers).status_code == 200
        refused = gateway.post("/api/chat", content=content, headers={**headers, **by_page})
        assert (refused.status_code, list(refused.json())) == (403, ["error"])


def test_client_raises_errors_with_status_and_message(client: OllamaClient) -> None:
    for act in (client.pull, client.push, client.delete):
        with pytest.raises(ResponseError, match=r"is not supported; .* `cellama models") as raised:
            act("tiny")
        assert raised.value.status_code == 400
    with pytest.raises(ResponseError, match="running models: tiny"):
        client.chat("nope", QUESTION)
    with pytest.raises(ResponseError, match="the prompt is too long") as raised:
        list(client.chat("tiny", [{"role": "user", "content": "x " * 9000}], stream=True))
    assert raised.value.status_code == 400


def test_keys_restrict_the_models_and_errors_have_ollamas_format(keyed: Keyed) -> None:
    def connect(key: str) -> OllamaClient:
        return OllamaClient(host=keyed.process.url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S)

    with connect("sk-wrong") as stranger:
        for act in (stranger.list, lambda: stranger.chat(**ASKED), lambda: stranger.show("tiny")):
            with pytest.raises(ResponseError) as raised:
                act()
            assert raised.value.status_code == 401
    with connect(keyed.add(models=["tiny"]).text) as allowed, connect(keyed.add(models=["big"]).text) as other:
        assert [one.model for one in allowed.list().models] == ["tiny:latest"]
        assert allowed.chat(**{**ASKED, "model": "tiny:latest"}).message.content
        assert not other.list().models
        assert not other.ps().models
        for act in (lambda: other.chat(**{**ASKED, "model": "tiny:latest"}), lambda: other.embed("tiny", "a")):
            with pytest.raises(ResponseError, match="may not use 'tiny'; it may use: big") as raised:
                act()
            assert raised.value.status_code == 403


def test_requests_and_tokens_count_against_the_limits_of_the_key(keyed: Keyed) -> None:
    def chat(key: str, num_tokens: int) -> None:
        with OllamaClient(host=keyed.process.url, headers={"authorization": f"Bearer {key}"}) as client:
            client.chat("tiny", QUESTION, options={"num_predict": num_tokens})

    for limits, num_tokens in (({"requests_per_minute": 1}, 1), ({"tokens_per_minute": 200}, 190)):
        key = keyed.add(**limits).text
        chat(key, 1)
        with pytest.raises(ResponseError) as raised:
            chat(key, num_tokens)
        assert raised.value.status_code == 429


def test_prefixes_are_shared_with_other_endpoints_but_not_with_other_tenants(keyed: Keyed) -> None:
    messages: Any = [{"role": "user", "content": "a fox and a bear and " * 20}]
    keys = [keyed.add().text for _ in range(2)]
    headers = {"authorization": f"Bearer {keys[0]}"}
    with OllamaClient(host=keyed.process.url, headers=headers) as client:
        client.chat("tiny", messages, options={"num_predict": 1})
    cached = []
    for key in keys:
        with keyed.client(key) as openai:
            usage = openai.chat.completions.create(model="tiny", messages=messages, max_tokens=1).usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            cached.append(usage.prompt_tokens_details.cached_tokens or 0)
    assert cached[0] > 20
    assert cached[1] == 0


def test_disconnecting_cancels_the_request(gateway: GatewayProcess, jobs_of_test: Callable[[], list[str]]) -> None:
    body = {"model": "tiny", "prompt": "Once", "raw": True, "ignore_eos": True, "options": {"num_predict": 1900}}

    async def leave() -> None:
        async with AsyncClient(host=gateway.url, timeout=PATIENCE_S) as client:
            parts: Any = await client._request(dict, "POST", "/api/generate", json=body, stream=True)
            async with aclosing(parts):
                await anext(parts)
                assert jobs_of_test()

    asyncio.run(leave())
    wait_until(lambda: not jobs_of_test(), "the end of the job")


def test_stream_ends_with_an_error_when_its_job_is_cancelled_elsewhere(
    client: OllamaClient, worker: WorkerProcess, queue: Client, jobs_of_test: Callable[[], list[str]]
) -> None:
    with worker.slowed():
        stream = client.generate("tiny", "Once", raw=True, options={"num_predict": 1900}, stream=True)
        next(iter(stream))
        for job_id in jobs_of_test():
            queue.cancel(job_id)
        with pytest.raises(ResponseError, match="was cancelled"):
            list(stream)


def test_keep_alives_are_empty_stream_parts(worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_GATEWAY_KEEPALIVE_S="1").wait_ready()
    worker.process.send_signal(signal.SIGSTOP)
    try:
        with OllamaClient(host=gateway.url, timeout=PATIENCE_S) as client:
            parts = client.chat(**ASKED, stream=True)
            first = next(parts)
            worker.process.send_signal(signal.SIGCONT)
            rest = list(parts)
    finally:
        worker.process.send_signal(signal.SIGCONT)
        assert gateway.stop() == 0
    assert (first.done, first.message.content) == (False, "")
    assert text_of(rest)
    assert rest[-1].done
