"""Test /v1/responses with OpenAI's unmodified client, a real gateway and a worker."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai as errors
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field
from redis import Redis

from cellama.api.client.client import Client
from cellama.tasks.contract.keys import due_key, job_key, journal_key, response_key, result_key

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess

FUNCTION: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
REQUEST: Any = {
    "model": "tiny",
    "input": "What is the capital of France?",
    "temperature": 0,
    "max_output_tokens": 12,
}
LONG: Any = {**REQUEST, "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}


class City(BaseModel):
    name: str = Field(max_length=12)
    is_large: bool


def events_of(stream: Any) -> list[dict[str, Any]]:
    return [event.to_dict() for event in stream]


def test_response_equals_the_chat_completion_and_is_stored(openai: OpenAI, queue: Client) -> None:
    answer = openai.responses.create(**REQUEST, metadata={"a": "b"}, instructions="Be brief")
    messages: Any = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": REQUEST["input"]}]
    job = queue.chat("tiny", messages, temperature=0, max_tokens=12).result(60)
    assert answer.output_text == job["text"]
    assert (answer.status, answer.model, answer.metadata) == ("completed", "tiny", {"a": "b"})
    assert answer.usage is not None
    assert answer.usage.output_tokens == job["usage"]["completion_tokens"]
    assert openai.responses.retrieve(answer.id) == answer
    (item,) = openai.responses.input_items.list(answer.id)
    assert item.to_dict()["content"] == [{"type": "input_text", "text": REQUEST["input"]}]


def test_response_shows_sampling_parameters_from_the_request_and_the_model(openai: OpenAI) -> None:
    sent: Any = {"top_p": 0.5, "max_tool_calls": 3, "safety_identifier": "s", "prompt_cache_key": "p"}
    more = {"presence_penalty": 0.25}  # not in OpenAI's API
    answer = openai.responses.create(model="tiny", input="Hi", max_output_tokens=1, **sent, extra_body=more)
    shown = answer.to_dict()
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tool_calls")
    assert [shown[name] for name in names] == [0.8, 0.5, 0.25, 0.0, 3]
    assert (shown["safety_identifier"], shown["prompt_cache_key"], shown["user"]) == ("s", "p", None)


def test_counted_input_tokens_equal_the_input_tokens_of_the_response(openai: OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": REQUEST["input"], "instructions": "Be brief", "tools": [FUNCTION]}
    counted = openai.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    first = openai.responses.create(**asked, temperature=0, max_output_tokens=8)
    assert first.usage is not None
    assert first.usage.input_tokens == counted.input_tokens
    items: Any = [{"role": "user", "content": REQUEST["input"]}, *first.to_dict()["output"]]
    more = openai.responses.input_tokens.count(
        input="And of Spain?", previous_response_id=first.id, instructions="Be brief", tools=[FUNCTION]
    )
    items.append({"role": "user", "content": "And of Spain?"})
    assert more == openai.responses.input_tokens.count(**{**asked, "input": items})
    for wrong, expected in (({"input": None}, "input is missing"), ({"temperature": 1}, "unknown parameter")):
        with pytest.raises(errors.BadRequestError, match=expected):
            openai.responses.input_tokens.count(model="tiny", extra_body=wrong)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # the client's type of messages has no place for users
def test_compacted_conversation_is_continued_with_its_summary(openai: OpenAI, queue: Client) -> None:
    first = openai.responses.create(**REQUEST)
    items: Any = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": REQUEST["input"]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"role": "user", "content": "Thanks"},
    ]
    compacted = openai.responses.compact(model="tiny", input=items)
    assert (compacted.object, compacted.usage.output_tokens > 0) == ("response.compaction", True)
    *users, summary = [item.to_dict() for item in compacted.output]
    texts = [part["text"] for item in users for part in item["content"]]
    assert ([item["role"] for item in users], texts) == (["user"] * 2, [REQUEST["input"], "Thanks"])
    assert summary["type"] == "compaction"
    text = summary["encrypted_content"].removeprefix("cellama-summary:")
    asked: Any = {**REQUEST, "input": [*compacted.output, {"role": "user", "content": "Go on"}]}
    contents = [*texts, f"Summary of the conversation so far:\n\n{text}", "Go on"]
    job = queue.chat(
        "tiny", [{"role": "user", "content": content} for content in contents], temperature=0, max_tokens=12
    )
    assert openai.responses.create(**asked).output_text == job.result(60)["text"]
    again = openai.responses.compact(model="tiny", previous_response_id=first.id, instructions="Be brief")
    assert [item.type for item in again.output] == ["message", "compaction"]
    foreign: Any = [{"type": "compaction", "encrypted_content": "gAAAAA"}]
    with pytest.raises(errors.BadRequestError, match="which another server created"):
        openai.responses.create(model="tiny", input=foreign)
    with pytest.raises(errors.BadRequestError, match="input is missing"):
        openai.responses.compact(model="tiny")


def test_item_references_resolve_to_items_of_stored_responses(openai: OpenAI) -> None:
    sent: Any = {**REQUEST, "input": "What is the weather in Paris?", "tools": [FUNCTION], "max_output_tokens": 60}
    first = openai.responses.create(**sent)
    [call] = [item for item in first.output if item.type == "function_call"]
    [question] = openai.responses.input_items.list(first.id)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    whole = openai.responses.create(**{**sent, "input": [{"role": "user", "content": sent["input"]}, call, result]})
    references = [{"type": "item_reference", "id": item.id} for item in (question, call)]
    answer = openai.responses.create(**{**sent, "input": [*references, result]})
    assert answer.output_text == whole.output_text != ""
    assert answer.usage
    assert whole.usage
    assert answer.usage.input_tokens == whole.usage.input_tokens
    assert [item.type for item in openai.responses.input_items.list(answer.id, order="asc")] == [
        "message",
        "function_call",
        "function_call_output",
    ]
    openai.responses.delete(first.id)
    with pytest.raises(errors.NotFoundError, match=r"input\[0\]\.id is .*send the item itself"):
        openai.responses.create(**{**sent, "input": [*references, result]})
    with pytest.raises(errors.BadRequestError, match="it must be a string"):
        openai.responses.create(**{**sent, "input": [{"type": "item_reference"}]})


def test_stream_is_the_same_when_reread_from_any_event(openai: OpenAI) -> None:
    received = events_of(openai.responses.create(**REQUEST, stream=True))
    assert [event["sequence_number"] for event in received] == list(range(len(received)))
    response_id = received[0]["response"]["id"]
    assert received[-1]["response"] == openai.responses.retrieve(response_id).to_dict()
    assert events_of(openai.responses.retrieve(response_id, stream=True)) == received
    for after in (0, 3, len(received) - 2, len(received) - 1, len(received) + 5):
        rest = events_of(openai.responses.retrieve(response_id, stream=True, starting_after=after))
        assert rest == received[after + 1 :]


def test_background_response_completes_without_a_connected_client(openai: OpenAI) -> None:
    created = openai.responses.create(**REQUEST, background=True)
    assert created.status in ("queued", "in_progress", "completed")
    wait_until(lambda: openai.responses.retrieve(created.id).status == "completed", "the response")
    received = events_of(openai.responses.retrieve(created.id, stream=True))
    assert [event["type"] for event in received[:3]] == ["response.created", "response.queued", "response.in_progress"]
    text = "".join(event["delta"] for event in received if event["type"] == "response.output_text.delta")
    assert text == openai.responses.create(**REQUEST).output_text


def test_reader_resumes_after_the_last_event_it_read(openai: OpenAI, worker: WorkerProcess) -> None:
    read: list[dict[str, Any]] = []
    with worker.slowed():
        with openai.responses.create(**{**LONG, "max_output_tokens": 60}, background=True, stream=True) as stream:
            for event in stream:
                read.append(event.to_dict())
                if len(read) == 12:
                    break
        response_id, last = read[0]["response"]["id"], read[-1]["sequence_number"]
    read += events_of(openai.responses.retrieve(response_id, stream=True, starting_after=last))
    assert read == events_of(openai.responses.retrieve(response_id, stream=True))
    assert read[-1]["response"]["status"] == "incomplete"


def test_cancelled_response_stays_cancelled(openai: OpenAI, worker: WorkerProcess) -> None:
    with worker.slowed():
        created = openai.responses.create(**LONG, background=True)
        wait_until(lambda: openai.responses.retrieve(created.id).status == "in_progress", "its begin")
        ended = openai.responses.cancel(created.id)
    assert ended.status == "cancelled"
    assert openai.responses.cancel(created.id) == ended == openai.responses.retrieve(created.id)
    assert events_of(openai.responses.retrieve(created.id, stream=True))[-1]["type"] == "response.cancelled"
    whole = openai.responses.create(**REQUEST)
    with pytest.raises(errors.BadRequestError, match="not a background response"):
        openai.responses.cancel(whole.id)


def test_deleted_response_leaves_no_redis_keys(openai: OpenAI, redis_client: Redis) -> None:
    answer = openai.responses.create(**REQUEST)
    openai.responses.delete(answer.id)
    for ask in (openai.responses.retrieve, openai.responses.delete, openai.responses.input_items.list):
        with pytest.raises(errors.NotFoundError):
            ask(answer.id)
    assert not redis_client.exists(response_key(answer.id))


def test_streams_end_when_their_response_is_deleted(openai: OpenAI, redis_client: Redis, worker: WorkerProcess) -> None:
    with worker.slowed():
        created = openai.responses.create(**LONG, background=True)
        record: Any = redis_client.get(response_key(created.id))
        job_id = json.loads(record)["job_id"]
        with ThreadPoolExecutor(3) as pool:
            readers = [openai.responses.retrieve(created.id, stream=True) for _ in range(3)]
            received = [[next(reader).to_dict() for _ in range(6)] for reader in readers]
            rest = [pool.submit(events_of, reader) for reader in readers]
            openai.responses.delete(created.id)
            read = [first + end.result(PATIENCE_S) for first, end in zip(received, rest, strict=True)]
    assert read[0] == read[1] == read[2]
    assert [event["sequence_number"] for event in read[0]] == list(range(len(read[0])))
    assert read[0][-1]["type"] == "response.cancelled"
    assert not redis_client.exists(journal_key(job_id), job_key(job_id), result_key(job_id), response_key(created.id))


def test_result_that_arrives_after_its_response_was_deleted_is_deleted(openai: OpenAI, redis_client: Redis) -> None:
    answer = openai.responses.create(**REQUEST)
    record: Any = redis_client.get(response_key(answer.id))
    job_id = json.loads(record)["job_id"]
    redis_client.zadd(due_key(), {job_id: time.time() + PATIENCE_S})
    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(openai.responses.delete, answer.id)
        wait_until(lambda: "zscore" in [each["cmd"] for each in redis_client.client_list()], "the look at what is due")
        pipe = redis_client.pipeline()
        pipe.set(result_key(job_id), "{}").zrem(due_key(), job_id).execute()
        deleting.result(PATIENCE_S)
    assert not redis_client.exists(journal_key(job_id), job_key(job_id), result_key(job_id), response_key(answer.id))


def test_unstored_response_returns_404(openai: OpenAI) -> None:
    answer = openai.responses.create(**REQUEST, store=False)
    assert answer.store is False  # type: ignore[attr-defined]
    with pytest.raises(errors.NotFoundError):
        openai.responses.retrieve(answer.id)
    with pytest.raises(errors.BadRequestError, match="requires store: true"):
        openai.responses.create(**REQUEST, store=False, background=True)


def test_conversation_continues_with_its_context(openai: OpenAI) -> None:
    first = openai.responses.create(**REQUEST)
    second = openai.responses.create(**{**REQUEST, "input": "And of Norway?"}, previous_response_id=first.id)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.total_tokens - 2
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert second.previous_response_id == first.id


def test_instructions_apply_only_to_one_response(openai: OpenAI) -> None:
    first = openai.responses.create(**REQUEST, instructions="Speak like a fox")
    arguments = {**REQUEST, "input": "And of Norway?", "previous_response_id": first.id}
    second = openai.responses.create(**arguments, instructions="Be brief")
    turns: Any = [
        {"role": "user", "content": REQUEST["input"]},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "And of Norway?"},
    ]
    sent = openai.responses.create(**{**REQUEST, "input": turns}, instructions="Be brief")
    assert second.output_text == sent.output_text
    assert second.usage is not None
    assert sent.usage is not None
    assert second.usage.input_tokens == sent.usage.input_tokens


def test_tool_is_called_and_its_result_is_used(openai: OpenAI) -> None:
    tools: Any = [FUNCTION, {"type": "web_search"}]
    forced: Any = {"type": "function", "name": "get_weather"}
    arguments: Any = {**REQUEST, "input": "Weather in Paris?", "tools": tools, "max_output_tokens": 80}
    first = openai.responses.create(**arguments, tool_choice=forced)
    call: Any = first.output[-1]
    assert (call.type, call.name, set(json.loads(call.arguments))) == ("function_call", "get_weather", {"city"})
    assert [tool.type for tool in first.tools] == ["function"]
    received = events_of(openai.responses.create(**arguments, tool_choice=forced, stream=True))
    spelled = "".join(e["delta"] for e in received if e["type"] == "response.function_call_arguments.delta")
    assert spelled == call.arguments
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    more = openai.responses.create(**{**arguments, "input": output}, previous_response_id=first.id)
    turns: Any = [{"role": "user", "content": "Weather in Paris?"}, call.to_dict(), *output]
    sent = openai.responses.create(**{**arguments, "input": turns})
    assert more.status in ("completed", "incomplete")
    assert sent.status in ("completed", "incomplete")


def test_function_in_a_namespace_is_called(openai: OpenAI) -> None:
    tools: Any = [{"type": "namespace", "name": "sky", "description": "The sky", "tools": [FUNCTION]}]
    forced: Any = {"type": "function", "namespace": "sky", "name": "get_weather"}
    arguments: Any = {**REQUEST, "input": "Weather in Paris?", "tools": tools, "max_output_tokens": 80}
    first = openai.responses.create(**arguments, tool_choice=forced)
    call: Any = first.output[-1]
    assert (call.type, call.name, call.namespace) == ("function_call", "get_weather", "sky")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    more = openai.responses.create(**{**arguments, "input": output}, previous_response_id=first.id)
    turns: Any = [{"role": "user", "content": "Weather in Paris?"}, call.to_dict(), *output]
    sent = openai.responses.create(**{**arguments, "input": turns})
    assert more.usage is not None
    assert sent.usage is not None
    assert more.usage.input_tokens == sent.usage.input_tokens


def test_call_truncated_by_max_output_tokens_is_incomplete(openai: OpenAI) -> None:
    named = [{"type": "function", "name": "get_weather"}]
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": named}
    arguments: Any = {**REQUEST, "input": "Weather in Paris?", "tools": [FUNCTION], "tool_choice": choice}
    whole: Any = openai.responses.create(**{**arguments, "max_output_tokens": 80}).output[-1]
    partial = []
    for max_tokens in range(1, 40):
        cut = openai.responses.create(**{**arguments, "max_output_tokens": max_tokens})
        if cut.status == "completed":
            break
        assert cut.status == "incomplete"
        assert cut.output_text == ""
        for item in cut.output:
            assert item.type == "function_call"
            assert whole.arguments.startswith(item.arguments)
            if item.status == "incomplete":
                partial.append((max_tokens, item.arguments))
    max_tokens, cut_arguments = partial[-1]
    received = events_of(openai.responses.create(**{**arguments, "max_output_tokens": max_tokens}, stream=True))
    assert (
        "".join(e["delta"] for e in received if e["type"] == "response.function_call_arguments.delta") == cut_arguments
    )
    assert received[-1]["type"] == "response.incomplete"
    assert received[-1]["response"]["output"][-1]["status"] == "incomplete"


def test_structured_output_is_parsed(openai: OpenAI) -> None:
    arguments = {**REQUEST, "max_output_tokens": 60}
    parsed = openai.responses.parse(**arguments, text_format=City).output_parsed
    assert isinstance(parsed, City)
    with openai.responses.stream(**arguments, text_format=City) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == parsed


def test_idempotency_key_returns_the_same_response(openai: OpenAI, redis_client: Redis) -> None:
    headers = {"Idempotency-Key": "order-17"}
    first = openai.responses.create(**REQUEST, extra_headers=headers)
    assert openai.responses.create(**REQUEST, extra_headers=headers) == first
    record: Any = redis_client.get(response_key(first.id))
    redis_client.delete(journal_key(json.loads(record)["job_id"]))  # as after event_ttl_s
    again = openai.responses.create(**REQUEST, extra_headers=headers)
    assert (again.id, again.output, again.created_at) == (first.id, first.output, first.created_at)
    with pytest.raises(errors.ConflictError):
        openai.responses.create(**{**REQUEST, "input": "Hi"}, extra_headers=headers)
    with pytest.raises(errors.NotFoundError, match="event_ttl_s"):
        openai.responses.retrieve(first.id, stream=True)


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": None}, "input"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"background": 1}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"colour": "red"}, "colour"),
        ({"colour": json.loads("[" * 700 + "]" * 700)}, "colour"),
        ({"input": [7]}, "input"),
        ({"text": {"format": "json_schema"}}, "text"),
        ({"template_args": 7}, "template_args"),
        ({"metadata": {"a": "half a pair: \ud800"}}, "metadata"),
        ({"user": float("nan"), "stream": True}, "user"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_invalid_parameters_are_rejected_with_the_field_name(
    gateway: GatewayProcess, wrong: dict[str, Any], param: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = gateway.post("/v1/responses", content=json.dumps({**REQUEST, **wrong}), headers=headers)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["?stream=maybe", "?stream=true&starting_after=-1", "?starting_after=1"])
def test_invalid_queries_are_rejected(gateway: GatewayProcess, openai: OpenAI, path: str) -> None:
    answer = openai.responses.create(**REQUEST)
    assert httpx.get(f"{gateway.url}/v1/responses/{answer.id}{path}").status_code == 400


@pytest.mark.parametrize("name", ["resp_x", "resp_" + "0" * 32, "..", "resp_" + "A" * 32, "x" * 5000])
def test_malformed_ids_return_404(gateway: GatewayProcess, name: str) -> None:
    for ask in (httpx.get, httpx.delete):
        assert ask(f"{gateway.url}/v1/responses/{name}").status_code == 404
