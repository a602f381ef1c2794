"""Provide batches of a gateway without workers, whose requests wait until their window ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from cellama.api.http.auth import Caller
from cellama.api.http.batches.driver import BatchDriver
from cellama.api.http.batches.leases import GatewayLease, names_without_lease
from cellama.api.http.batches.run_files import Parts, run_directory
from cellama.api.http.batches.service import BatchOrder, BatchService
from cellama.api.http.files.records import Record
from cellama.api.http.files.service import FileService
from cellama.api.http.files.store import FileStore
from cellama.config import Settings
from cellama.tasks.contract.keys import batch_key

from .....conftest import PATIENCE_S

ACME = Caller("acme")
CHAT = "/v1/chat/completions"


def request(custom_id: str, model: str = "tiny") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": f"Tell me of {custom_id}"}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def lines_of(values: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def settings_for(url: str, folder: Path, **changed: Any) -> Settings:
    """Return settings of an independent gateway, because the environment of the test run has another Redis."""
    return Settings().model_copy(update={"redis_url": url, "data_dir": folder / "data", **changed})


class World:
    """Files, batches and clients that the drivers of a test share."""

    def __init__(self, redis: Redis, settings: Settings, store: FileStore, folder: Path) -> None:
        self.redis, self.settings, self.store, self.folder = redis, settings, store, folder
        self.files, self.batches = FileService(store, redis), BatchService(settings, redis)

    async def create_batch(self, *ids: str, window_s: int = 86_400, caller: Caller = ACME) -> Record:
        """Create a batch with these requests. With a negative window, it has expired already."""
        local = self.folder / "in.jsonl"
        local.write_bytes(lines_of([request(custom_id) for custom_id in ids]))
        file = await self.files.add(local, "in.jsonl", "batch", caller, 3600)
        local.unlink()
        order = BatchOrder(
            input_file_id=file["id"],
            endpoint=CHAT,
            completion_window="24h",
            window_s=window_s,
            metadata=None,
            output_life_s=3600,
        )
        return await self.batches.create(order, caller, None, await self.files.store_id())

    async def answer(self, batch_id: str, *ids: str) -> None:
        """Store answers to these requests, as an earlier driver would have done."""
        body = {"usage": {"prompt_tokens": 5, "completion_tokens": 3}}
        response = {"status_code": 200, "request_id": "r", "body": body}
        values = [{"id": "r", "custom_id": custom_id, "response": response, "error": None} for custom_id in ids]
        folder = run_directory(self.store, batch_id)
        folder.mkdir(parents=True, exist_ok=True)
        output = folder / "output.jsonl"
        output.write_bytes(lines_of(values))
        if not self.store.shares_work:
            parts = Parts(self.store, batch_id)
            assert parts.save(output)
            await self.change(batch_id, parts=parts.names, parts_bytes=parts.num_bytes)

    async def change(self, batch_id: str, **fields: Any) -> None:
        of = ("validating", "in_progress", "finalizing")
        assert (await self.batches.records.advance(batch_id, fields, expected=of, life_s=86_400))[0]

    async def driver(self, batch_id: str) -> tuple[BatchDriver, GatewayLease]:
        lease = GatewayLease(self.redis, batch_id, self.settings.gateway_lease_s)
        assert await lease.take()
        return BatchDriver(self.settings, self.files, self.batches, lease, await self.read(batch_id)), lease

    async def free(self, *batch_ids: str) -> set[str]:
        """Return the batches without a driver."""
        return await names_without_lease(self.redis, batch_ids)

    async def drive(self, batch_id: str) -> Record:
        """Drive a batch until it ends or is released."""
        driver, _ = await self.driver(batch_id)
        await driver.drive()
        return await self.read(batch_id)

    async def read(self, batch_id: str) -> Record:
        record = await self.batches.records.read(batch_id)
        assert record is not None
        return record

    async def runs(self, batch_id: str) -> None:
        """Wait until the run has started and waits for workers."""

        async def has_started() -> bool:
            return await self.redis.hget(batch_key(batch_id), "state") == b"in_progress"

        await until(has_started)

    async def lines(self, file_id: str) -> list[dict[str, Any]]:
        """Return the contents that a client gets for a file."""
        record = await self.files.records.find(file_id, ACME)
        data = b"".join(await self.files.blocks(file_id))
        assert len(data) == record["bytes"]
        return [json.loads(line) for line in data.splitlines()]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():
            await asyncio.sleep(0.02)
