"""Test batches from their input file to their end, including failures of their drivers."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis as SyncRedis

from cellama.api.batch.work import WorkFile
from cellama.api.http.batches.run_files import Parts, run_directory
from cellama.api.http.files.store import FileStore
from cellama.tasks.contract.keys import http_lease_key
from cellama.tasks.state.bulk_runs import Batches
from cellama.tasks.traces.gate import trace_span

from .....conftest import PATIENCE_S
from ....tasks.traces.conftest import Spans, spans
from .conftest import RunWorld
from .world import ACME, World

__all__ = ["spans"]


async def check_no_remains(world: World, batch_id: str) -> None:
    assert not run_directory(world.store, batch_id).exists()
    assert await world.batches.open_batches() == []
    assert await world.free(batch_id) == {batch_id}
    for key in await world.redis.keys("cellama:http:*"):
        assert await world.redis.ttl(key) > 0, key


def test_batch_reports_unanswered_requests_as_expired_when_window_ends(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a", "b", window_s=-1))["id"]
        await world.answer(batch_id, "a")
        batch = await world.drive(batch_id)
        assert (batch["status"], batch["counts"]) == ("expired", {"total": 2, "completed": 1, "failed": 1})
        assert (batch["usage"]["input_tokens"], batch["usage"]["output_tokens"]) == (5, 3)
        assert [line["custom_id"] for line in await world.lines(batch["output_file_id"])] == ["a"]
        failed = await world.lines(batch["error_file_id"])
        assert [(line["custom_id"], line["error"]["code"]) for line in failed] == [("b", "batch_expired")]
        await check_no_remains(world, batch_id)

    run_world(scenario)


def test_batch_completes_when_all_requests_are_answered(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a", "b"))["id"]
        await world.answer(batch_id, "b", "a")
        batch = await world.drive(batch_id)
        assert (batch["status"], batch["error_file_id"]) == ("completed", None)
        assert [line["custom_id"] for line in await world.lines(batch["output_file_id"])] == ["b", "a"]
        await check_no_remains(world, batch_id)

    run_world(scenario)


def test_output_files_are_replaced_when_gateway_died_while_storing_them(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a", "b"))["id"]
        await world.answer(batch_id, "a", "b")
        half = world.folder / "half"
        half.write_bytes(b'{"custom_id": "a"}\n')
        file_id = f"file-{batch_id.removeprefix('batch_')}-output"
        await world.files.add(half, "half", "batch_output", ACME, 3600, file_id=file_id)
        await world.change(batch_id, status="finalizing", ends_as="completed", total=2)
        batch = await world.drive(batch_id)
        assert (batch["status"], batch["output_file_id"]) == ("completed", file_id)
        assert [line["custom_id"] for line in await world.lines(file_id)] == ["a", "b"]
        await check_no_remains(world, batch_id)

    run_world(scenario)


def test_driver_that_lost_its_lease_changes_nothing_and_next_driver_resumes(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a", "b"))["id"]
        driver, held = await world.driver(batch_id)
        driving = asyncio.create_task(driver.drive())
        await world.runs(batch_id)
        await world.redis.set(http_lease_key(batch_id), "another gateway's")
        held.lose()  # as after some seconds without a renewal
        await driving
        assert await world.redis.get(http_lease_key(batch_id)) == b"another gateway's"
        assert (await world.read(batch_id))["status"] == "in_progress"
        await world.redis.delete(http_lease_key(batch_id))
        assert (await world.batches.cancel(batch_id, ACME))["status"] == "cancelling"
        batch = await world.drive(batch_id)
        assert (batch["status"], batch["counts"]) == ("cancelled", {"total": 2, "completed": 0, "failed": 0})
        await check_no_remains(world, batch_id)

    run_world(scenario)


def test_driver_releases_batch_when_gateway_stops(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a"))["id"]
        driver, _ = await world.driver(batch_id)
        driving = asyncio.create_task(driver.drive())
        await world.runs(batch_id)
        driver.stop()
        await driving
        assert await world.free(batch_id) == {batch_id}
        assert (await world.read(batch_id))["status"] == "in_progress"
        assert len(await world.batches.open_batches()) == 1

    run_world(scenario)


@pytest.mark.parametrize("store", ["directory"], indirect=True)
def test_batch_waits_when_another_process_has_its_work_file_open(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a", window_s=-1))["id"]
        folder = run_directory(world.store, batch_id)
        folder.mkdir(parents=True)
        with contextlib.closing(WorkFile(folder / "output.jsonl.work")):
            assert (await world.drive(batch_id))["status"] == "validating"
        assert (await world.drive(batch_id))["status"] == "expired"

    run_world(scenario)


@pytest.mark.parametrize("is_driven", [True, False])
def test_batch_ends_when_command_line_cancels_it(run_world: RunWorld, url: str, is_driven: bool) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a"))["id"]
        driver, _ = await world.driver(batch_id)
        driving = asyncio.create_task(driver.drive())
        await world.runs(batch_id)
        if not is_driven:
            driver.stop()
            await driving
        with SyncRedis.from_url(url) as redis:
            Batches(redis).cancel(batch_id)
        if is_driven:
            await driving
        else:
            await world.drive(batch_id)
        assert (await world.read(batch_id))["status"] == "cancelled"
        await check_no_remains(world, batch_id)

    run_world(scenario)


def test_batch_has_no_files_when_cancelled_before_its_start(run_world: RunWorld) -> None:
    async def scenario(world: World) -> Any:
        batch_id = (await world.create_batch("a"))["id"]
        await world.batches.cancel(batch_id, ACME)
        batch = await world.drive(batch_id)
        await check_no_remains(world, batch_id)
        return await world.batches.view(batch)

    shown = run_world(scenario)
    assert (shown["status"], shown["output_file_id"], shown["error_file_id"]) == ("cancelled", None, None)
    assert shown["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


def test_batch_fails_when_its_input_file_is_deleted(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        created = await world.create_batch("a")
        await world.files.delete(await world.files.records.find(created["input_file_id"], ACME))
        batch = await world.drive(created["id"])
        assert (batch["status"], batch["errors"][0]["code"]) == ("failed", "file_not_found")
        await check_no_remains(world, created["id"])

    run_world(scenario)


def test_output_parts_contain_new_output_and_are_downloaded_when_listed_in_the_record(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        output = world.folder / "output"
        output.write_bytes(b"first\n")
        parts = Parts(world.store, "batch_1")
        assert parts.save(output)
        assert not parts.save(output)
        output.write_bytes(b"first\nsecond\n")
        assert parts.save(output)
        for num_named, expected in ((1, b"first\n"), (2, b"first\nsecond\n")):
            there, fetched = world.folder / "there", Parts(world.store, "batch_1", parts.names[:num_named])
            fetched.download(there)
            assert (there.read_bytes(), fetched.num_bytes) == (expected, len(expected))

    run_world(scenario)


def test_output_parts_are_stored_at_increasing_intervals(store: FileStore) -> None:
    now, saved_at = 0.0, [0.0]
    schedule = Parts(store, "batch_1", clock=lambda: now)
    while now < 3600:
        now += 0.2  # one turn of the run
        if schedule.is_due():
            assert now - saved_at[-1] <= max(1.0, min(30.0, 0.1 * now)) + 0.2
            saved_at.append(now)
    assert saved_at[1] < 1.3
    assert 120 <= len(saved_at) <= 180


@pytest.mark.parametrize("store", ["directory"], indirect=True)
def test_running_batch_does_not_use_upload_threads(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))  # the smallest possible pool
        batch_id = (await world.create_batch("a"))["id"]
        driver, _ = await world.driver(batch_id)
        driving = asyncio.create_task(driver.drive())
        await world.runs(batch_id)
        async with asyncio.timeout(PATIENCE_S):
            await world.create_batch("b")
        driver.stop()
        await driving

    run_world(scenario)


@pytest.mark.parametrize("store", ["directory"], indirect=True)
def test_batch_error_contains_no_paths_when_run_cannot_resume(run_world: RunWorld) -> None:
    async def scenario(world: World) -> None:
        batch_id = (await world.create_batch("a"))["id"]
        folder = run_directory(world.store, batch_id)
        folder.mkdir(parents=True)
        with contextlib.closing(WorkFile(folder / "output.jsonl.work")) as work:
            work.set(output_size=999)  # more than the output has, as if it had been truncated
        batch = await world.drive(batch_id)
        assert (batch["status"], batch["errors"][0]["code"]) == ("failed", "internal_error")
        assert str(world.folder) not in str(batch["errors"])

    run_world(scenario)


def test_run_span_is_a_child_of_the_request_that_created_the_batch(run_world: RunWorld, spans: Spans) -> None:
    async def scenario(world: World) -> None:
        with trace_span("request", {}):
            batch_id = (await world.create_batch("a", window_s=-1))["id"]
        await world.drive(batch_id)

    run_world(scenario)
    assert spans.one("batch run").parent.span_id == spans.one("request").context.span_id
