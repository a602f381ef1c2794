"""Test OpenAI's unmodified batch scripts with real gateways and a worker."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai as errors
import pytest
from openai import OpenAI
from openai.types import Batch
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.keys import http_lease_key

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")

Lines = list[dict[str, Any]]


def request(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me of {number} foxes"}]
    sent = {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": sent}


def upload(client: OpenAI, lines: Lines, **more: Any) -> str:
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch", **more).id


def create_batch(client: OpenAI, lines: Lines, **more: Any) -> Batch:
    endpoint: Any = lines[0]["url"]
    file_id = upload(client, lines)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h", **more)


def ended(client: OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in ENDED, "the end of the batch")
    return client.batches.retrieve(batch.id)


def lines_of(client: OpenAI, file_id: str | None) -> Lines:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_batch_answers_each_request_once(openai: OpenAI) -> None:
    lines = [request(number) for number in range(20)] + [request(20, temperature="hot")]
    batch = ended(openai, create_batch(openai, lines, metadata={"of": "a test"}))
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"of": "a test"}, "tiny")
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 21, "completed": 20, "failed": 1}
    output = lines_of(openai, batch.output_file_id)
    assert sorted(line["custom_id"] for line in output) == sorted(line["custom_id"] for line in lines[:20])
    sent = lines[3]["body"]
    alone = openai.chat.completions.create(**sent).choices[0].message.content
    received = next(line for line in output if line["custom_id"] == "r3")["response"]
    assert (received["status_code"], received["body"]["choices"][0]["message"]["content"]) == (200, alone)
    failed = lines_of(openai, batch.error_file_id)
    assert [(line["custom_id"], line["error"]["code"]) for line in failed] == [("r20", "invalid_request")]
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)


@pytest.mark.parametrize(
    ("url", "content"), [("/v1/completions", {"prompt": "Once", "max_tokens": 2}), ("/v1/embeddings", {"input": "a"})]
)
def test_batch_accepts_requests_to_each_other_endpoint(openai: OpenAI, url: str, content: dict[str, Any]) -> None:
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "tiny", **content}}
    batch = ended(openai, create_batch(openai, [line]))
    assert batch.status == "completed"
    assert len(lines_of(openai, batch.output_file_id)) == 1


def test_batch_of_responses_returns_the_same_answers_as_the_endpoint(openai: OpenAI) -> None:
    body: Any = {"model": "tiny", "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 8}
    body |= {"instructions": "Be brief", "metadata": {"of": "a test"}}
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/responses", "body": body} for name in "ab"]
    lines.append({**lines[0], "custom_id": "c", "body": {**body, "previous_response_id": "resp_x"}})
    batch = ended(openai, create_batch(openai, lines))
    assert batch.status == "completed"
    received = [line["response"]["body"] for line in lines_of(openai, batch.output_file_id)]
    alone = openai.responses.create(**body).to_dict()
    differing = {"id", "created_at", "completed_at", "store", "service_tier", "output", "usage"}
    for answer in received:
        assert {name: value for name, value in answer.items() if name not in differing} == {
            name: value for name, value in alone.items() if name not in differing
        }
        assert answer["output"][0]["content"] == alone["output"][0]["content"]  # type: ignore[index]
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(answer["usage"]["output_tokens"] for answer in received)
    [failed] = lines_of(openai, batch.error_file_id)
    assert "previous_response_id" in failed["error"]["message"]


def test_batch_fails_with_line_numbers_when_its_file_is_invalid(openai: OpenAI) -> None:
    lines = [request(1), request(1), {**request(2), "url": "/v1/embeddings"}]
    batch = ended(openai, create_batch(openai, lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == [
        ("duplicate_custom_id", 2),
        ("mismatched_endpoint", 3),
    ]
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_cancelled_batch_keeps_finished_answers(openai: OpenAI, worker: WorkerProcess) -> None:
    lines = [request(number, max_tokens=1500, ignore_eos=True) for number in range(200)]
    with worker.slowed():
        batch = create_batch(openai, lines)
        wait_until(lambda: openai.batches.retrieve(batch.id).status == "in_progress", "the run")
        assert openai.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        batch = ended(openai, batch)
    assert batch.status == "cancelled"
    assert batch.request_counts is not None
    assert batch.request_counts.completed < batch.request_counts.total == 200
    with pytest.raises(errors.ConflictError):
        openai.batches.cancel(run_batch(openai).id)


def run_batch(client: OpenAI) -> Batch:
    return ended(client, create_batch(client, [request(1)]))


def test_lists_are_paginated_and_files_can_be_deleted(openai: OpenAI) -> None:
    ids = [upload(openai, [request(number)]) for number in range(3)]
    listed = [file.id for file in openai.files.list(limit=2, order="asc", purpose="batch")]  # the client fetches pages
    assert [file_id for file_id in listed if file_id in ids] == sorted(ids, key=listed.index)
    assert set(ids) <= set(listed)
    assert openai.files.delete(ids[0]).deleted
    with pytest.raises(errors.NotFoundError):
        openai.files.retrieve(ids[0])
    with pytest.raises(errors.NotFoundError):
        openai.batches.create(input_file_id=ids[0], endpoint=CHAT, completion_window="24h")
    batch = run_batch(openai)
    assert batch.id in [known.id for known in openai.batches.list(limit=5)]


def test_invalid_files_are_rejected(openai: OpenAI, gateway: GatewayProcess) -> None:
    with pytest.raises(errors.BadRequestError, match="purpose"):
        openai.files.create(file=("a", b"{}"), purpose="vision")
    with pytest.raises(errors.BadRequestError, match="file is empty"):
        openai.files.create(file=("a", b""), purpose="batch")
    with pytest.raises(errors.BadRequestError, match="expires_after"):
        upload(openai, [request(1)], expires_after={"anchor": "created_at", "seconds": 5})
    file_id = upload(openai, [request(1)], expires_after={"anchor": "created_at", "seconds": 3600})
    file = openai.files.retrieve(file_id)
    assert file.expires_at is not None
    assert 3600 <= file.expires_at - file.created_at <= 3601
    assert httpx.post(f"{gateway.url}/v1/files", json={}).status_code == 415


@pytest.fixture
def start_gateway(redis_server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    started: list[GatewayProcess] = []

    def start(**settings: str) -> GatewayProcess:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(GatewayProcess(folder, redis_server.url, **settings))
        return started[-1].wait_ready()

    yield start
    for process in started:
        if process.process.poll() is None:
            process.stop()


@pytest.mark.parametrize("place", ["directory", "url"])
def test_batch_resumes_in_another_gateway_when_its_gateway_is_killed(
    worker: WorkerProcess,
    start_gateway: Callable[..., GatewayProcess],
    redis_client: Redis,
    tmp_path: Path,
    place: str,
) -> None:
    shared = str(tmp_path / "shared")

    def start(number: int) -> GatewayProcess:
        where = shared if place == "directory" else f"file://{shared}"
        work = str(tmp_path / f"work{number}")  # as on separate machines
        return start_gateway(CELLAMA_GATEWAY_FILES_DIR=where, CELLAMA_GATEWAY_WORK_DIR=work)

    first = start(1)
    with worker.slowed(), OpenAI(base_url=f"{first.url}/v1", api_key="none") as client:
        lines = [request(number, max_tokens=16, ignore_eos=True) for number in range(300)]
        batch = create_batch(client, lines)

        def has_started() -> bool:
            counts = client.batches.retrieve(batch.id).request_counts
            return counts is not None and counts.completed > 10

        wait_until(has_started, "the first answers")
        first.process.kill()
        first.process.wait(PATIENCE_S)
    redis_client.delete(http_lease_key(batch.id))  # it would expire after half a minute
    second = start(2)
    with OpenAI(base_url=f"{second.url}/v1", api_key="none") as client:
        batch = ended(client, batch)
        assert batch.status == "completed"
        output = lines_of(client, batch.output_file_id)
    assert sorted(line["custom_id"] for line in output) == sorted(line["custom_id"] for line in lines)
