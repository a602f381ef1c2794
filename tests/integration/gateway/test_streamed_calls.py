"""Arguments of tool calls are streamed while the model writes them, by every API and in the events of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer

from ...conftest import PATIENCE_S, WorkerProcess, empty_database
from ...gateways import GatewayProcess

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "number": {"type": "integer", "minimum": 0, "maximum": 99},
        "text": {"type": "string", "minLength": 40, "maxLength": 60},
    },
    "required": ["number", "text"],
    "additionalProperties": False,
}
FUNCTION = {"name": "write", "description": "Write a text", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
QUESTION: Any = [{"role": "user", "content": "Write a story about a fox."}]
STEP_S = 0.2  # step time of a slowed worker, so that no call ends before the worker is killed
MIN_PIECES = 10  # fewer than any tokenizer needs for 40 characters


@pytest.fixture(scope="module")
def arguments(gateway: GatewayProcess) -> str:
    """The arguments of the call in an answer that is not streamed."""
    with Client() as client:
        job = client.chat("tiny", QUESTION, tools=TOOLS, tool_choice="write", temperature=0, seed=1, wait=True)
        (call,) = job.result(PATIENCE_S)["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"number", "text"}
    return call["function"]["arguments"]


def test_chat_streams_a_tool_call_in_pieces(openai: OpenAI, arguments: str) -> None:
    sent: Any = {"model": "tiny", "messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
    chunks = list(openai.chat.completions.create(**sent, stream=True))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(d.index, d.type, d.function and d.function.name) for d in deltas[:2]] == [
        (0, "function", "write"),
        (0, None, None),
    ]
    assert deltas[0].id
    pieces = [delta.function.arguments for delta in deltas if delta.function is not None]
    assert "".join(piece or "" for piece in pieces) == arguments
    assert len(pieces) > MIN_PIECES
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_response_streams_a_tool_call_in_pieces(openai: OpenAI, arguments: str) -> None:
    tools: Any = [{"type": "function", **FUNCTION}]
    sent: Any = {"model": "tiny", "input": QUESTION, "tools": tools, "tool_choice": "required", "temperature": 0}
    received = [event.to_dict() for event in openai.responses.create(**sent, stream=True)]
    deltas = [event["delta"] for event in received if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == arguments
    assert len(deltas) > MIN_PIECES
    response_id = received[0]["response"]["id"]
    assert [event.to_dict() for event in openai.responses.retrieve(response_id, stream=True)] == received


def test_message_streams_a_tool_call_in_pieces(gateway: GatewayProcess, arguments: str) -> None:
    tools: Any = [{"name": "write", "description": "Write a text", "input_schema": SCHEMA}]
    sent: Any = {
        "model": "tiny",
        "messages": QUESTION,
        "tools": tools,
        "max_tokens": 200,
        "extra_body": {"temperature": 0},
    }
    client = Anthropic(base_url=gateway.url, api_key="none", max_retries=0)
    with client, client.messages.stream(**sent, tool_choice={"type": "any"}) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    assert "".join(pieces) == arguments
    assert len(pieces) > MIN_PIECES
    assert [(block.type, block.type == "tool_use" and block.input) for block in message.content] == [
        ("tool_use", json.loads(arguments))
    ]


def deltas_of(events: list[Any]) -> list[Any]:
    return [delta for event in events for delta in event.get("tool_call_deltas", ())]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_job_events_contain_a_tool_call_in_pieces(queue: Client, arguments: str, is_streamed: bool) -> None:
    params: Any = {"tools": TOOLS, "tool_choice": "write", "temperature": 0, "stream": is_streamed}
    job = queue.chat("tiny", QUESTION, wait=True, **params)
    events: list[Any] = list(job.stream())
    deltas = deltas_of(events)
    (call,) = events[-1]["tool_calls"]
    assert (deltas[0]["id"], deltas[0]["name"]) == (call["id"], "write")
    assert "".join(delta["arguments"] for delta in deltas) == call["function"]["arguments"] == arguments
    assert len(deltas) > MIN_PIECES
    assert job.result(PATIENCE_S)["message"]["tool_calls"] == [call]


def test_streamed_tool_call_continues_on_another_worker(
    redis_server: RedisServer, tmp_path: Path, arguments: str
) -> None:
    with empty_database(redis_server, 12) as url, Client(url) as client:
        workers: list[WorkerProcess] = []

        def start(name: str) -> WorkerProcess:
            (tmp_path / name).mkdir()
            workers.append(WorkerProcess(tmp_path / name, url, name=name).wait_ready())
            return workers[-1]

        try:
            with start("a").slowed(STEP_S):
                params: Any = {"tools": TOOLS, "tool_choice": "write", "temperature": 0, "stream": True}
                job = client.chat("tiny", QUESTION, wait=True, **params)
                events: list[Any] = []
                for event in job.stream():
                    events.append(event)
                    if len(workers) == 1 and len(deltas_of(events)) == MIN_PIECES // 2:
                        workers[0].process.kill()
                        workers[0].process.wait()
                        num_before = len(deltas_of(events))
                        start("b")
            assert len(deltas_of(events)) > num_before > 0
            assert [event["seq"] for event in events] == list(range(len(events)))
            assert "".join(delta["arguments"] for delta in deltas_of(events)) == arguments
            (call,) = events[-1]["tool_calls"]
            assert call["function"]["arguments"] == arguments
            assert call["id"] == deltas_of(events)[0]["id"]
            assert sum("id" in delta for delta in deltas_of(events)) == 1
            for after in (-1, 3):
                assert list(job.stream(after)) == events[after + 1 :]
        finally:
            for worker in workers:
                worker.stop()
