"""Test the loop that drives batches: which batches it drives, and which files it deletes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from cellama.api.http import background
from cellama.api.http.auth import Caller
from cellama.api.http.batches.run_files import run_directory
from cellama.api.http.batches.runner import BatchRunner
from cellama.config import Settings

from .conftest import RunWorld
from .world import ACME, World, settings_for, until

pytestmark = pytest.mark.parametrize("store", ["directory"], indirect=True)
LONG_AGO = 1_000_000_000.0


def settings_of(world: World, **changed: Any) -> Settings:
    return settings_for(
        world.settings.redis_url, world.folder, gateway_files_dir=str(world.folder / "store"), **changed
    )


def test_batch_is_driven_only_by_gateways_that_use_its_file_store(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a", window_s=-1))["id"]
        blind = BatchRunner(settings_for(world.settings.redis_url, world.folder))
        idle = BatchRunner(settings_of(world, gateway_batches_at_once=0))
        seeing = BatchRunner(settings_of(world))
        for runner in (blind, idle):
            await runner.sweep()
            await runner.poll()
            assert await world.free(batch_id) == {batch_id}
        seeing.start()
        seeing.start()

        async def has_ended() -> bool:
            return (await world.read(batch_id))["status"] == "expired"

        await until(has_ended)
        for runner in (blind, idle, seeing):
            await runner.close()
        assert not (world.folder / "data").exists()  # nothing is created before the first file

    run_world(scenario)


def test_batch_is_driven_immediately_when_gateway_polled_before_first_file(run_world: RunWorld) -> None:
    """The batch does not wait for the next sweep, which is a minute later."""

    async def scenario(world: World) -> None:
        runner = BatchRunner(settings_of(world))
        await runner.sweep()
        batch_id = (await world.create_batch("a"))["id"]
        await runner.poll()
        assert await world.free(batch_id) == set()
        await runner.close()

    run_world(scenario)


def test_batch_has_no_lease_after_its_gateway_has_shut_down(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a"))["id"]
        runner = BatchRunner(settings_of(world))
        await runner.sweep()
        await runner.poll()
        assert await world.free(batch_id) == set()
        await world.runs(batch_id)
        await runner.close()
        assert await world.free(batch_id) == {batch_id}

    run_world(scenario)


def test_driver_yields_when_another_tenant_has_no_driver(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        mine = [(await world.create_batch(name))["id"] for name in ("a", "b", "c")]
        runner = BatchRunner(settings_of(world, gateway_batches_at_once=2))
        await runner.sweep()
        for _ in range(3):
            await runner.poll()
        [waiting] = await world.free(*mine)
        other = (await world.create_batch("d", caller=Caller("other")))["id"]

        async def is_driven() -> bool:
            await runner.poll()
            return await world.free(other) == set()

        await until(is_driven)
        for _ in range(3):
            await runner.poll()
        assert len(await world.free(*mine, other) - {waiting}) == 1  # and no more
        await runner.close()

    run_world(scenario)


def test_cancelled_and_expired_batches_are_driven_even_above_the_limit(run_world: RunWorld) -> None:
    """One batch is cancelled, and the window of another one has ended."""

    async def scenario(world: World) -> None:
        runner = BatchRunner(settings_of(world, gateway_batches_at_once=1))
        first = (await world.create_batch("a"))["id"]
        await runner.poll()
        waiting, cancelled = [(await world.create_batch(name))["id"] for name in ("b", "c")]
        late = (await world.create_batch("d", window_s=-1))["id"]
        await world.batches.cancel(cancelled, ACME)

        async def have_ended() -> bool:
            await runner.poll()
            return [(await world.read(name))["status"] for name in (cancelled, late)] == ["cancelled", "expired"]

        await until(have_ended)
        assert await world.free(first, waiting) == {waiting}
        await runner.close()

    run_world(scenario)


def test_batch_in_another_store_does_not_stop_a_driver(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        mine = [(await world.create_batch(name))["id"] for name in ("a", "b")]
        runner = BatchRunner(settings_of(world, gateway_batches_at_once=2))
        await runner.sweep()
        for _ in range(2):
            await runner.poll()
        elsewhere = await world.create_batch("c", caller=Caller("other"))
        await world.change(elsewhere["id"], place="another")
        for _ in range(3):
            await runner.poll()
        assert not any(driver.is_stopping for driver, _ in runner._driven.values())
        assert await world.free(*mine) == set()
        await runner.close()

    run_world(scenario)


def test_batch_files_are_deleted_when_the_driver_died_before_deleting_them(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch = await world.create_batch("a")
        folder = run_directory(world.store, batch["id"])
        folder.mkdir(parents=True)
        await world.change(batch["id"], status="failed")
        runner = BatchRunner(settings_of(world))
        await runner.sweep()
        await runner.poll()
        assert not folder.exists()
        assert await world.batches.open_batches() == []
        await runner.close()

    run_world(scenario)


def test_sweep_deletes_unchanged_directories_of_finished_batches(run_world: RunWorld) -> None:
    def folder(world: World, batch_id: str, changed_at: float | None) -> Path:
        made = run_directory(world.store, batch_id)
        made.mkdir(parents=True)
        (made / "output.jsonl").touch()
        for path in (made / "output.jsonl", made):
            if changed_at is not None:
                os.utime(path, (changed_at, changed_at))
        return made

    async def scenario(world: World) -> None:
        open_id = (await world.create_batch("a"))["id"]
        lost = folder(world, "batch_lost", LONG_AGO)
        recent, still_open = folder(world, "batch_recent", None), folder(world, open_id, LONG_AGO)
        upload = world.store.work_dir / "incoming" / "x"
        upload.mkdir(parents=True)
        os.utime(upload, (LONG_AGO, LONG_AGO))
        runner = BatchRunner(settings_of(world))
        await runner.sweep()
        assert [path.exists() for path in (lost, upload, recent, still_open)] == [False, False, True, True]
        await runner.close()

    run_world(scenario)


def test_outage_is_logged_once(
    run_world: RunWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "POLL_S", 0.001)

    async def scenario(world: World) -> None:
        looks = 0

        async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal looks
            looks += 1
            writer.close()

        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            runner = BatchRunner(settings_for(f"redis://127.0.0.1:{port}/0", world.folder))
            runner.start()

            async def has_looked_often() -> bool:
                return looks > 20

            await until(has_looked_often)
            await runner.close()

    run_world(scenario)
    assert len([message for message in caplog.messages if message.startswith("background loop interrupted")]) == 1
