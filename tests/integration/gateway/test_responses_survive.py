"""Kill the gateway, the worker and Redis during background responses. Each reader must get the whole text once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, reference_texts

from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess

NUM_RESPONSES, NUM_TOKENS = 4, 400
STEP_S = 0.3  # step time of a slowed worker, so that no response ends before the processes are killed
PROMPT = "Tell a story about {} foxes"
LOST = (APIError, httpx.TransportError)
MODELS = [{"id": "tiny", "source": "bundled://tiny", "n_parallel": NUM_RESPONSES, "threads": 1, "default": True}]


class House:
    """The Redis, worker and gateway of one test, which may kill and restart them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_started = 0
        self.redis = RedisServer.start(folder / "redis")
        self.start_worker()
        self.gateway = GatewayProcess(self._new(), self.redis.url).wait_ready()

    def _new(self) -> Path:
        self._num_started += 1
        folder = self._folder / str(self._num_started)
        folder.mkdir()
        return folder

    def start_worker(self, step_s: float = 0.0) -> None:
        """Slow the worker down: each step takes `step_s` until `slowed` is removed."""
        settings, folder = {"CELLAMA_MODELS": json.dumps(MODELS)}, self._new()
        if step_s:
            (folder / "pace").write_text(str(step_s))
        self.worker = WorkerProcess(folder, self.redis.url, name=f"w{self._num_started}", **settings).wait_ready()

    def slowed(self) -> Any:
        return self.worker.slowed(STEP_S)

    def kill_gateway(self) -> None:
        self.gateway.process.kill()
        self.gateway.process.wait()
        self.gateway = GatewayProcess(self._new(), self.redis.url).wait_ready()

    def kill_worker(self) -> None:
        self.worker.process.kill()
        self.worker.process.wait()
        self.start_worker(STEP_S)

    def restart_redis(self) -> None:
        self.redis.stop()
        self.redis.run()

    def close(self) -> None:
        self.gateway.stop()
        self.worker.stop()
        self.redis.stop()

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


class Reader(threading.Thread):
    """Reads a response to its end. When its stream breaks, it resumes after the last event."""

    def __init__(self, house: House, response_id: str) -> None:
        super().__init__(daemon=True)
        self._house, self._id = house, response_id
        self.events: list[dict[str, Any]] = []
        self.start()

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in ("response.completed", "response.incomplete")

    def run(self) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not self.has_ended and time.monotonic() < deadline:
            after: Any = {"starting_after": self.events[-1]["sequence_number"]} if self.events else {}
            try:
                with self._house.client() as client:
                    for event in client.responses.retrieve(self._id, stream=True, **after):
                        self.events.append(event.to_dict())
            except LOST:
                time.sleep(0.05)


def create_response(client: OpenAI, number: int) -> Any:
    return client.responses.create(
        model="tiny",
        input=PROMPT.format(number),
        temperature=0,
        max_output_tokens=NUM_TOKENS,
        background=True,
        extra_body={"ignore_eos": True},
    )


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def undisturbed(house: House) -> list[ReferenceText]:
    """Return the undisturbed texts. Where two tokens are almost equally likely, either is correct."""
    params: Any = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": LOGPROBS}
    with Client(house.redis.url) as client:
        sent: list[Any] = [[{"role": "user", "content": PROMPT.format(number)}] for number in range(NUM_RESPONSES)]
        jobs = [client.chat("tiny", messages, wait=True, **params) for messages in sent]
        return reference_texts([job.result(PATIENCE_S) for job in jobs], "bundled://tiny")


def test_readers_get_each_event_once_when_all_processes_are_killed(house: House) -> None:
    expected = undisturbed(house)
    with house.slowed(), house.client() as client:
        readers = [Reader(house, create_response(client, number).id) for number in range(NUM_RESPONSES)]
        wait_until(lambda: all(len(reader.events) > 10 for reader in readers), "the first events")
        house.kill_gateway()
        some = [len(reader.events) for reader in readers]
        wait_until(lambda: all(len(r.events) > n for r, n in zip(readers, some, strict=True)), "readers that go on")
        house.kill_worker()
    with house.slowed():
        some = [len(reader.events) for reader in readers]
        wait_until(lambda: all(len(r.events) > n for r, n in zip(readers, some, strict=True)), "the next attempt")
        house.restart_redis()
    wait_until(lambda: all(reader.has_ended for reader in readers), "the ends", 2 * PATIENCE_S)
    for reader, text in zip(readers, expected, strict=True):
        assert [event["sequence_number"] for event in reader.events] == list(range(len(reader.events)))
        deltas = (e["delta"] for e in reader.events if e["type"] == "response.output_text.delta")
        assert (received := "".join(deltas)) == text_of(reader.events[-1]["response"])
        assert text.compare(received) != "other"
