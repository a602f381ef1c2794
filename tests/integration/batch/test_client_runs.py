"""Bulk runs that clients start."""

from __future__ import annotations

import asyncio

import pytest

from cellama.api import AsyncClient, Client
from cellama.api.batch.options import Progress, Summary
from cellama.tasks.contract.errors import InvalidJob

from ...conftest import PATIENCE_S, WorkerProcess
from .conftest import Commands, stories


def test_client_runs_a_file_and_reports_progress(worker: WorkerProcess, commands: Commands, model: str) -> None:
    commands.write([{"id": i, "prompt": f"Once upon a time {i}"} for i in range(5)])
    seen: list[int] = []
    with Client() as client:
        summary = client.batch(
            commands.folder / "in.jsonl", commands.output, model=model, ordered=True, max_tokens=3,
            on_progress=lambda progress: seen.append(progress.finished),
        )  # fmt: skip
    assert (summary.state, summary.progress.finished, summary.errors) == ("completed", 5, None)
    assert [each["id"] for each in commands.results()] == [0, 1, 2, 3, 4]
    assert seen[-1] == 5


def test_client_reads_a_column_and_its_error_lists_valid_options(
    worker: WorkerProcess, commands: Commands, model: str
) -> None:
    (commands.folder / "in.csv").write_text("name,question\na,Hi\nb,Once\n")
    source, target = commands.folder / "in.csv", commands.output
    with Client() as client:
        summary = client.batch(source, target, model=model, column="question", form="openai", max_tokens=2)
        assert (summary.state, summary.progress.finished) == ("completed", 2)
        assert {each["custom_id"] for each in commands.results()} == {"1", "2"}
        with pytest.raises(InvalidJob, match="form is 'long'; it must be one of auto, openai, short"):
            client.batch(source, target, form="long")


def test_cancelled_async_run_resumes_with_the_same_call(worker: WorkerProcess, commands: Commands, model: str) -> None:
    commands.write([*stories(1, max_tokens=4), *stories(40, max_tokens=200)[1:]])
    source, target = commands.folder / "in.jsonl", commands.output

    async def run() -> Summary:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def note(progress: Progress) -> None:
            if progress.finished:
                loop.call_soon_threadsafe(begun.set)

        async with AsyncClient() as client:
            with worker.slowed():
                running = asyncio.create_task(client.batch(source, target, model=model, on_progress=note))
                await asyncio.wait_for(begun.wait(), PATIENCE_S)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
            assert 1 <= len(commands.results()) < 40
            return await client.batch(source, target, model=model)

    summary = asyncio.run(run())
    assert (summary.state, summary.progress.finished) == ("completed", 40)
    assert len({each["id"] for each in commands.results()}) == len(commands.results()) == 40
