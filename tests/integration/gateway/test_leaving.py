"""Test clients that disconnect, retry or read slowly, and a gateway that stops."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai as errors
import pytest
from openai import OpenAI
from redis import Redis

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer

from ...conftest import PATIENCE_S, SLOTS, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from .conftest import CHAT, LONG

NUM_CLIENTS = 40
BODY = {**{name: value for name, value in LONG.items() if name != "extra_body"}, "ignore_eos": True}


def none_is_open(jobs_of_test: Callable[[], list[str]], worker: WorkerProcess) -> bool:
    engine = worker.engine_now()
    return not jobs_of_test() and engine["requests_running"] == engine["requests_waiting"] == 0


def traces(redis: Redis, job_ids: Collection[str]) -> Iterator[str]:
    """Yield the keys without a TTL that contain one of these job ids in their name, fields or members."""
    names = [job_id.encode() for job_id in job_ids]
    for key in redis.scan_iter(count=1000):
        if redis.ttl(key) == -1 and any(name in part for part in (key, *contents(redis, key)) for name in names):
            yield key.decode()


def contents(redis: Any, key: bytes) -> list[bytes]:
    """Return the fields, members and entries of a key of any type."""
    reads: dict[bytes, Any] = {
        b"hash": lambda: [part for pair in redis.hgetall(key).items() for part in pair],
        b"zset": lambda: redis.zrange(key, 0, -1),
        b"set": lambda: redis.smembers(key),
        b"list": lambda: redis.lrange(key, 0, -1),
        b"stream": lambda: [part for _, fields in redis.xrange(key) for pair in fields.items() for part in pair],
        b"string": lambda: [redis.get(key) or b""],
        b"none": list,
    }
    return list(reads[redis.type(key)]())


def test_slots_and_keys_are_freed_when_clients_disconnect(
    gateway: GatewayProcess, worker: WorkerProcess, jobs_of_test: Callable[[], list[str]], redis_client: Redis
) -> None:
    async def send_request(client: httpx.AsyncClient, number: int) -> None:
        body = {**BODY, "stream": number % 2 == 0, "prompt": f"Number {number}"}
        async with client.stream("POST", f"{gateway.url}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                pass

    async def leave() -> list[str]:
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
            asking = [asyncio.create_task(send_request(client, number)) for number in range(NUM_CLIENTS)]
            await asyncio.to_thread(wait_until, lambda: len(jobs_of_test()) == NUM_CLIENTS, "all jobs")
            await asyncio.to_thread(wait_until, lambda: worker.engine()["requests_running"] == SLOTS, "busy slots")
            ids = jobs_of_test()
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            return ids

    with worker.slowed():
        ids = asyncio.run(leave())
        wait_until(lambda: none_is_open(jobs_of_test, worker), "free slots")
    assert len(ids) == NUM_CLIENTS
    wait_until(lambda: not list(traces(redis_client, ids)), "nothing that names a job and has no TTL")


def test_job_with_idempotency_key_survives_a_disconnect_and_serves_the_retry(
    gateway: GatewayProcess, worker: WorkerProcess, queue: Client
) -> None:
    key = {"idempotency-key": "again"}
    body = {**CHAT, "max_tokens": 30, "ignore_eos": True}
    with worker.slowed(0.5), pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=key, timeout=1)
    again = [gateway.post("/v1/chat/completions", json=body, headers=key).json() for _ in range(2)]
    assert again[0]["id"] == again[1]["id"]
    assert again[0]["usage"]["completion_tokens"] == 30
    streamed = gateway.post("/v1/chat/completions", json={**body, "seed": 2}, headers=key)
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_stream_ends_with_an_error_when_its_job_is_cancelled_elsewhere(
    openai: OpenAI, worker: WorkerProcess, queue: Client
) -> None:
    with worker.slowed():
        stream = openai.completions.create(**LONG, stream=True)
        job_id = next(iter(stream)).id.removeprefix("cmpl-")
        queue.cancel(job_id)
        with pytest.raises(errors.APIError, match="was cancelled"):
            list(stream)


def test_keep_alives_are_sent_before_and_after_the_first_token(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_GATEWAY_KEEPALIVE_S="1").wait_ready()
    body = {**BODY, "stream": True, "max_tokens": 1}
    worker.process.send_signal(signal.SIGSTOP)
    try:
        with gateway.stream("/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            assert next(lines).startswith(": position 1")
            worker.process.send_signal(signal.SIGCONT)
            received = [line for line in lines if line]
    finally:
        worker.process.send_signal(signal.SIGCONT)
        assert gateway.stop() == 0
    assert received[-1] == "data: [DONE]"
    assert received[-2].startswith("data: {")


def test_gateway_finishes_streams_and_rejects_new_requests_when_it_stops(
    worker: WorkerProcess, redis_server: RedisServer, queue: Client, tmp_path: Path
) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url).wait_ready()
    body = {**BODY, "stream": True, "max_tokens": 20}
    with worker.slowed(), gateway.stream("/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        gateway.process.send_signal(signal.SIGTERM)
        received = [line for line in lines if line]
    assert received[-1] == "data: [DONE]"
    assert gateway.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in gateway.log()


def test_gateway_cancels_its_streams_when_drain_s_has_elapsed(
    worker: WorkerProcess, redis_server: RedisServer, jobs_of_test: Callable[[], list[str]], tmp_path: Path
) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_DRAIN_S="1").wait_ready()
    with (
        worker.slowed(),
        gateway.stream("/v1/completions", json={**BODY, "stream": True}) as answer,
    ):
        next(answer.iter_lines())
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(PATIENCE_S) == 0
        wait_until(lambda: none_is_open(jobs_of_test, worker), "free slots")


def test_slow_reader_delays_only_its_own_stream(
    gateway: GatewayProcess, openai: OpenAI, jobs_of_test: Callable[[], list[str]]
) -> None:
    """Read nothing until the job of the slow reader has ended. It must then receive the whole stream."""
    body = json.dumps({**BODY, "stream": True, "max_tokens": 100, "n": 8}).encode()
    with socket.create_connection(("127.0.0.1", gateway.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lines = ("POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json",
                 f"content-length: {len(body)}", "connection: close", "", "")  # fmt: skip
        slow.sendall("\r\n".join(lines).encode() + body)
        assert openai.chat.completions.create(**CHAT).choices[0].message.content
        wait_until(lambda: not jobs_of_test(), "the end of its job")
        received = b""
        while part := slow.recv(65536):
            received += part
    assert received.count(b'"finish_reason":"length"') == 8
    assert b"data: [DONE]" in received


def test_request_gets_429_with_retry_after_when_wait_is_too_long(
    worker: WorkerProcess, redis_server: RedisServer, queue: Client, tmp_path: Path
) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_GATEWAY_MAX_WAIT_S="1").wait_ready()
    with worker.slowed():
        jobs = [queue.generate("tiny", f"Number {n}", max_tokens=1900, ignore_eos=True) for n in range(2 * SLOTS)]
        try:
            wait_until(lambda: (queue.stats()["eta_s"]["tiny"] or 0) > 2, "a long queue")
            with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
                with pytest.raises(errors.RateLimitError, match="the estimated wait is") as caught:
                    client.chat.completions.create(**CHAT)
                assert int(caught.value.response.headers["retry-after"]) >= 1
        finally:
            for job in jobs:
                job.cancel()
    assert gateway.stop() == 0
