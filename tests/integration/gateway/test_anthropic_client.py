"""Anthropic's unmodified client with a real gateway and worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from cellama.api.client.client import Client

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from .conftest import CHAT

REQUEST: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "messages": CHAT["messages"],
    "extra_body": {"temperature": 0},
}
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
    },
}
CALL: dict[str, Any] = {
    **REQUEST,
    "max_tokens": 200,
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "get_weather"},
}


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[Anthropic]:
    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as made:
        yield made


def test_message_equals_the_result_of_the_same_job(client: Anthropic, queue: Client) -> None:
    answer = client.messages.create(**REQUEST)
    job = queue.chat("tiny", CHAT["messages"], temperature=0, max_tokens=12, enable_thinking=False).result(60)
    assert [block.to_dict()["text"] for block in answer.content] == [job["text"]]
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == job["usage"]["prompt_tokens"]
    assert (usage.output_tokens, usage.service_tier) == (job["usage"]["completion_tokens"], "standard")
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert answer._request_id
    assert queue.position(answer.id.removeprefix("msg_")).state == "done"


def test_streamed_events_add_up_to_the_message(client: Anthropic) -> None:
    whole = client.messages.create(**REQUEST)
    with client.messages.stream(**REQUEST) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].to_dict()["text"]
    assert [(block.type, block.text) for block in streamed.content] == [("text", text)]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_models_are_listed_and_retrieved_in_anthropics_format(client: Anthropic, gateway: GatewayProcess) -> None:
    [listed] = client.models.list()
    assert client.models.retrieve("tiny") == listed
    assert (listed.id, listed.type, listed.lifecycle, listed.max_input_tokens) == ("tiny", "model", "active", 2047)
    assert listed.created_at.year >= 2026
    page = client.models.list(limit=1)
    assert (page.has_more, page.first_id, page.last_id) == (False, "tiny", "tiny")
    assert list(client.models.list(after_id="tiny")) == list(client.models.list(lifecycle=["retired"])) == []
    with pytest.raises(anthropic.BadRequestError, match="after_id is 'nope'"):
        client.models.list(after_id="nope")
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.models.retrieve("nope")
    assert raised.value.type == "not_found_error"
    assert gateway.get("/v1/models", headers={"x-api-key": "none"}).json()["data"][0]["display_name"] == "tiny"
    assert gateway.get("/v1/models").json()["object"] == "list"


def test_base_url_may_end_with_v1(gateway: GatewayProcess, client: Anthropic) -> None:
    with Anthropic(base_url=f"{gateway.url}/v1/", api_key="none", max_retries=0) as other:
        assert other.messages.create(**REQUEST).content == client.messages.create(**REQUEST).content
        assert other.models.retrieve("tiny").id == "tiny"


def test_tool_call_and_result_round_trip(client: Anthropic) -> None:
    with client.messages.stream(**CALL) as stream:
        streamed = stream.get_final_message()
    answer = client.messages.create(**CALL)
    [call], [streamed_call] = (
        [block for block in one.content if block.type == "tool_use"] for one in (answer, streamed)
    )
    assert (answer.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    assert (call.name, call.input) == (streamed_call.name, streamed_call.input)
    assert isinstance(call.input["city"], str)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
    turns = [
        *REQUEST["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    last = client.messages.create(**{**REQUEST, "messages": turns, "tools": [TOOL]})
    assert last.role == "assistant"


def test_call_truncated_by_max_tokens_is_returned_as_call(client: Anthropic) -> None:
    num_partial = 0
    for max_tokens in range(4, 40):
        answer = client.messages.create(**{**CALL, "max_tokens": max_tokens})
        if answer.stop_reason == "tool_use":
            break
        assert answer.stop_reason == "max_tokens"
        assert all(block.type == "tool_use" for block in answer.content)
        with client.messages.stream(**{**CALL, "max_tokens": max_tokens}) as stream:
            deltas = [event.partial_json for event in stream if event.type == "input_json"]
            streamed = stream.get_final_message()
        for call, same in zip(answer.content, streamed.content, strict=True):
            assert call.type == same.type == "tool_use"
            assert (call.name, call.input) == ("get_weather", same.input)
            num_partial += any(deltas)
    assert num_partial > 1


def test_client_tool_runner_works_and_the_thread_parameter_is_rejected(client: Anthropic) -> None:
    cities: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city"""
        cities.append(city)
        return "12 degrees"

    sent: Any = {**CALL, "tools": [get_weather]}
    replies = list(client.beta.messages.tool_runner(**sent, max_iterations=2))
    assert [reply.stop_reason for reply in replies] == ["tool_use", "tool_use"]
    assert cities
    with pytest.raises(anthropic.BadRequestError, match=r"thread is .*send all messages"):
        client.beta.messages.create(**REQUEST, thread={"type": "create"})


def test_count_tokens_equals_prompt_tokens(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=REQUEST["messages"], system="Be kind.")
    usage = client.messages.create(**REQUEST, system="Be kind.").usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_billing_line_does_not_prevent_prefix_sharing(client: Anthropic) -> None:
    rules = "Answer in one word, and never in two. " * 8
    usages = []
    for number in range(2):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"},
            {"type": "text", "text": rules, "cache_control": {"type": "ephemeral"}},
        ]
        usages.append(client.messages.create(**REQUEST, system=system).usage)
    read = usages[1].cache_read_input_tokens or 0
    assert read >= usages[0].input_tokens + (usages[0].cache_read_input_tokens or 0) - 1
    assert usages[1].input_tokens <= 1


def test_stop_sequence_is_reported(client: Anthropic) -> None:
    text = client.messages.create(**REQUEST).content[0].to_dict()["text"]
    stop = str(text)[3:5]
    answer = client.messages.create(**REQUEST, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    ("wrong", "error", "kind"),
    [
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"stop_sequences": 3}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"top_k": -2}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"unheard_of": 1}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"extra_body": {"priority": 0}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "unheard-of"}, anthropic.NotFoundError, "not_found_error"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_raise_anthropic_client_exceptions(
    client: Anthropic, wrong: dict[str, Any], error: type[anthropic.APIStatusError], kind: str, stream: bool
) -> None:
    with pytest.raises(error) as raised:
        client.messages.create(**{**REQUEST, **wrong}, stream=stream)
    body: Any = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == raised.value.request_id


def test_image_is_rejected_with_the_field_name(client: Anthropic) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    turns: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0.*only process text"):
        client.messages.create(**{**REQUEST, "messages": turns})


def test_slot_is_freed_when_client_disconnects_from_stream(
    client: Anthropic, jobs_of_test: Callable[[], list[str]], worker: WorkerProcess
) -> None:
    long = {**REQUEST, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with worker.slowed():
        with client.messages.create(**long, stream=True) as stream:
            assert next(iter(stream)).type == "message_start"
        wait_until(lambda: not jobs_of_test(), "the end of its job")
        assert worker.engine_now()["requests_running"] == 0


def test_max_tokens_may_exceed_the_context(client: Anthropic) -> None:
    sent = {
        **REQUEST,
        "max_tokens": 32_000,
        "timeout": PATIENCE_S,
    }  # the client refuses long requests without a timeout
    assert client.messages.create(**sent).stop_reason == "end_turn"


def test_models_are_listed(client: Anthropic) -> None:
    assert "tiny" in [model.id for model in client.models.list()]


def test_frames_have_event_names_but_no_done_marker(gateway: GatewayProcess) -> None:
    body = {**{name: value for name, value in REQUEST.items() if name != "extra_body"}, "stream": True}
    answer = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60)
    frames = [frame.split("\n") for frame in answer.text.strip().split("\n\n") if not frame.startswith(":")]
    for name, data in frames:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert frames[-1][0] == "event: message_stop"


def test_system_message_between_turns_is_accepted(client: Anthropic) -> None:
    messages: Any = [*REQUEST["messages"], {"role": "system", "content": "Be kind."}]
    assert client.messages.create(**{**REQUEST, "messages": messages}).content


def test_turn_started_by_the_caller_is_continued(client: Anthropic) -> None:
    whole = client.messages.create(**REQUEST).content[0].to_dict()["text"]
    messages: Any = [*REQUEST["messages"], {"role": "assistant", "content": str(whole)[:21]}]
    rest = client.messages.create(**{**REQUEST, "messages": messages}).content[0].to_dict()["text"]
    assert rest == str(whole)[21:]
