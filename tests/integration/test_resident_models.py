"""A worker loads, uses and unloads a chat model, an embedder and a second generation model under load."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.bench.models.synthetic import Shape, write_model

from ..bert_model import BertShape
from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .conftest import GREEDY

CYCLES = 2
BIG = Shape(n_embd=512, n_layer=8, n_head=8, n_head_kv=8, n_ff=1536, n_vocab=4096, n_ctx=4096)  # 31M parameters
ENCODER = BertShape(n_embd=128, n_layer=3, n_head=4, n_head_kv=4, n_ff=512, n_vocab=4096)
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
Call = Callable[[Client], Any]


@pytest.fixture
def name() -> str:
    """Return a name for the worker, which is also the prefix of its models' ids."""
    return f"w{uuid.uuid4().hex[:8]}"


@pytest.fixture
def worker(redis_server: RedisServer, tmp_path: Path, name: str) -> Iterator[WorkerProcess]:
    write_model(tmp_path / "big.gguf", BIG)
    write_model(tmp_path / "encoder.gguf", ENCODER)
    models = [{"id": f"{name}-chat", "source": "bundled://tiny", "capabilities": ["chat"], "threads": 1}]
    process = WorkerProcess(tmp_path, redis_server.url, name=name, CELLAMA_MODELS=json.dumps(models))
    yield process.wait_ready()
    process.stop()


class Callers:
    """Run threads that call models repeatedly until the block ends."""

    def __init__(self, client: Client, calls: list[Call]) -> None:
        self.counts = [0] * len(calls)
        self.failures: list[Exception] = []
        self._client = client
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(place, call)) for place, call in enumerate(calls)]
        for thread in self._threads:
            thread.start()

    def _call(self, place: int, call: Call) -> None:
        while not self._stop.is_set():
            try:
                call(self._client)
                self.counts[place] += 1
            except Exception as error:
                self.failures.append(error)

    def wait_for_more(self, count: int = 3) -> None:
        """Wait until each thread has received this number of further results."""
        before = list(self.counts)
        wait_until(
            lambda: self.failures or all(now >= then + count for now, then in zip(self.counts, before, strict=True)),
            "results of all models",
        )

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def test_three_models_share_a_worker_and_free_their_memory(worker: WorkerProcess, name: str) -> None:
    chat, big, encoder = (f"{name}-{kind}" for kind in ("chat", "big", "encoder"))
    folder, process = worker.log_path.parent, psutil.Process(worker.process.pid)
    patience = {"worker": name, "timeout": PATIENCE_S}

    def chats(client: Client) -> None:
        result = client.chat(chat, HELLO, wait=True, **GREEDY).result(PATIENCE_S)
        assert result["text"] == "The capital of France is Paris."

    def generates(client: Client) -> None:
        result = client.generate(big, "a b c", max_tokens=8, ignore_eos=True, wait=True, **GREEDY).result(PATIENCE_S)
        assert result["usage"]["completion_tokens"] == 8

    def embeds(client: Client) -> None:
        result = client.embed(encoder, ["w1 w2", "w3"], wait=True).result(PATIENCE_S)
        assert [len(vector) for vector in result["embeddings"]] == [128, 128]

    def cycle(client: Client) -> int:
        """Load both models, use all three, and unload both while jobs arrive. Return the memory that both used."""
        lean: Any = {"threads": 1, "cache_ram_bytes": 0, **patience}
        client.load_model(big, str(folder / "big.gguf"), n_parallel=8, ctx_per_slot=2048, **lean)
        client.load_model(encoder, str(folder / "encoder.gguf"), threads=1, **patience)
        callers.wait_for_more()
        taken = sum(m["memory_bytes"] for m in client.memory(name)[0]["models"] if m["id"] in (big, encoder))
        client.unload_model(big, **patience)
        client.unload_model(encoder, **patience)
        return taken

    with Client() as client:
        callers = Callers(client, [chats, chats, generates, embeds])
        try:
            cycle(client)  # memory that libraries allocate only once
            level = process.memory_info().rss
            taken = min(cycle(client) for _ in range(CYCLES))
            assert taken > 100e6
            wait_until(lambda: process.memory_info().rss < level + taken, "the initial memory, without the models")
            client.load_model(big, str(folder / "big.gguf"), threads=1, **patience)
            client.load_model(encoder, str(folder / "encoder.gguf"), threads=1, **patience)
            callers.wait_for_more()
        finally:
            callers.stop()
        assert callers.failures == []
