"""Test the files of a bulk run: they have whole lines only, states survive crashes, and no line runs twice."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cellama.api.batch.lines import BatchLine, LineId, StoredLine
from cellama.api.batch.options import TOKENS, BatchOptions, Progress
from cellama.api.batch.output import LineFile, id_of, rewrite_without
from cellama.api.batch.run import MAX_CHUNK_BYTES, _fitting_lines as fitting_lines
from cellama.api.batch.start import LINES_PER_REPORT, _open_output as open_output, paths_of, read_input
from cellama.api.batch.work import FAILED, FINISHED, IN_FLIGHT, PENDING, TWIN, WorkFile
from cellama.tasks.contract.kinds.chunk import max_lines_bytes
from cellama.tasks.jobs import _payload_json as check_size
from cellama.tasks.state.ledger import TaskCall


def line(number: int, prompt: str, line_id: LineId | None = None, model: str = "m") -> BatchLine:
    return BatchLine(number, line_id or f"id{number}", "short", "generate", model, {"prompt": prompt})


def read(work: WorkFile, *lines: BatchLine, merge: bool = False) -> set[str]:
    """Read an input with these lines, and return the ids whose results are outdated."""
    with work.reading():
        assert [work.add(each, merge=merge) for each in lines] == [None] * len(lines)
    outdated = outdated_of(work)
    work.forget_outdated()
    return outdated


def outdated_of(work: WorkFile) -> set[str]:
    return {name for name in (f"id{number}" for number in range(60)) if work.is_outdated(name)}


@pytest.fixture
def work(tmp_path: Path) -> Iterator[WorkFile]:
    with contextlib.closing(WorkFile(tmp_path / "w")) as work:
        yield work


def test_line_file_truncates_an_incomplete_last_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"id": 1}\n{"id": 2}\n{"id": ' + b"x" * 100_000)
    with contextlib.closing(LineFile(path)) as file:
        file.append([{"id": 3}])
        assert [value["id"] for value in file.lines()] == [1, 2, 3]
    assert file.size == path.stat().st_size


def test_line_file_contains_only_complete_lines_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.write, []

    def write_half(fd: int, data: bytes) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(fd, data[: len(data) // 2])

    with contextlib.closing(LineFile(tmp_path / "out")) as file:
        file.append([{"id": 1}])
        monkeypatch.setattr(os, "write", write_half)
        with pytest.raises(OSError, match="No space left"):
            file.append([{"id": 2}, {"id": 3}])
        monkeypatch.undo()
        file.append([{"id": 4}])
    assert (tmp_path / "out").read_text() == '{"id": 1}\n{"id": 4}\n'


def test_line_file_also_writes_appended_lines_to_the_echo_stream(tmp_path: Path) -> None:
    (tmp_path / "out").write_text('{"id": 1}\n')
    with (tmp_path / "echo").open("wb") as echo, contextlib.closing(LineFile(tmp_path / "out", echo.fileno())) as file:
        file.append([{"id": 2}])
        file.append([{"id": "ä"}])
    assert (tmp_path / "echo").read_text() == '{"id": 2}\n{"id": "ä"}\n'


def test_rewrite_without_removes_outdated_results_in_both_formats(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text('{"id": "a"}\n{"id": "x", "custom_id": "b"}\n{"id": "c"}\n')
    rewrite_without(path, {"a", "b"}.__contains__)
    assert path.read_text() == '{"id": "c"}\n'


def test_work_file_cannot_be_opened_twice(work: WorkFile) -> None:
    with pytest.raises(sqlite3.OperationalError):
        WorkFile(work.path)


def test_next_lines_returns_lines_with_a_common_prefix_together(work: WorkFile) -> None:
    prompts = ["fox a", "cat a", "fox b", "cat b", "ant"]
    read(work, *(line(i + 1, prompt) for i, prompt in enumerate(prompts)), line(9, "aaa", model="other"))
    assert work.pending == {"m": 5, "other": 1}
    assert [each.params["prompt"] for each in work.next_lines("m", 4)] == ["ant", "cat a", "cat b", "fox a"]
    work.take("chunk", work.next_lines("m", 4))
    assert work.pending == {"m": 1, "other": 1}


def test_line_is_pending_again_when_its_chunk_is_lost(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "b"), line(3, "c"))
    work.take("chunk", work.next_lines("m", 3))
    assert work.chunks() == ["chunk"]
    first = work.line("chunk", 0)
    assert first is not None
    work.finish(first)
    assert work.line("chunk", 0) is None
    assert work.give_back("chunk", tried=True) == 2
    assert [work.count(state) for state in (PENDING, IN_FLIGHT, FINISHED, FAILED)] == [2, 0, 1, 0]
    assert [each.number for each in work.next_lines("m", 5)] == [2]  # a line that was tried before is sent alone
    assert work.tried_out(1)
    assert not work.tried_out(2)


def test_reading_keeps_line_states_and_drops_results_of_changed_lines(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "b"), line(3, "c"))
    first, second, third = work.next_lines("m", 3)
    for each in (first, second):
        work.finish(each)
    work.finish(third, failed=True)
    assert read(work, line(1, "a"), line(2, "b"), line(3, "c")) == set()
    assert work.count(FINISHED) == 2
    assert work.has_failed("id3")
    # the second has changed, the first is gone, the third has moved
    assert read(work, line(1, "B", "id2"), line(2, "c", "id3"), line(3, "new", "id4")) == {"id1", "id2"}
    assert [work.count(state) for state in (PENDING, FINISHED, FAILED)] == [2, 0, 1]


def test_outdated_results_survive_a_crash_until_they_are_removed(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "b"))
    for each in work.next_lines("m", 2):
        work.finish(each)
    with work.reading():
        work.add(line(1, "A", "id1"))
    work.close()  # before the output was rewritten
    with contextlib.closing(WorkFile(work.path)) as again:
        with again.reading():
            again.add(line(1, "A", "id1"))
        assert outdated_of(again) == {"id1", "id2"}
        again.forget_outdated()
        assert not again.is_outdated()
        assert again.count(PENDING) == 1


def test_failed_read_changes_nothing(work: WorkFile) -> None:
    read(work, *(line(i, "a") for i in range(1, 4)))
    work.finish(work.next_lines("m", 1)[0])

    def read_until_it_ends() -> None:
        with work.reading():
            for i in range(1, 3000):
                work.add(line(i, "b"))
            assert not work.keeps_results()
            raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        read_until_it_ends()
    assert not work.is_outdated()
    assert [work.count(state) for state in (PENDING, FINISHED)] == [2, 1]


def test_identical_lines_wait_for_the_first_line(work: WorkFile) -> None:
    lines = [line(1, "a"), line(2, "b"), line(3, "a"), line(4, "a"), line(5, "b")]
    read(work, *lines, merge=True)
    assert work.pending == {"m": 2}
    work.take("chunk", work.next_lines("m", 1))
    first = work.line("chunk", 0)
    assert first is not None
    assert [each.id for each in work.twins(first, 9)] == ["id3", "id4"]
    for each in (first, *work.twins(first, 9)):
        work.finish(each)
    assert work.pending == {"m": 1}
    assert [work.count(state) for state in (PENDING, FINISHED, TWIN)] == [1, 3, 1]
    read(work, *lines[2:], merge=True)  # without the line whose outcome the last line waits for
    assert [each.id for each in work.next_lines("m", 9)] == ["id5"]


def test_retry_failed_makes_failed_lines_pending(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "b"))
    for each in work.next_lines("m", 2):
        work.finish(each, failed=True)
    work.retry_failed()
    assert [each.id for each in work.next_lines("m", 9)] == ["id1", "id2"]


def test_add_returns_the_earlier_line_of_a_duplicate_id(work: WorkFile) -> None:
    with work.reading():
        assert work.add(line(1, "a", "x")) is None
        assert work.add(line(2, "b", "x")) == 1


def test_ids_with_different_types_are_different(work: WorkFile) -> None:
    big = 2**64 + 1
    lines = [line(1, "a", 7), line(2, "b", "7"), line(3, "c", big)]
    read(work, *lines)
    assert list(work.open_lines()) == [(1, 7), (2, "7"), (3, big)]
    assert work.finish_by_id(7)
    assert work.finish_by_id(big)
    assert list(work.open_lines()) == [(2, "7")]
    assert [each.id for each in work.next_lines("m", 9)] == ["7"]
    work.finish(work.next_lines("m", 9)[0], failed=True)
    assert (work.has_failed("7"), work.has_failed(7)) == (True, False)
    with work.reading():
        assert work.add(line(1, "A", 7)) is None
        assert work.add(line(2, "B", 7)) == 1
        assert work.add(line(3, "B", "7")) is None
    assert (work.is_outdated(7), work.is_outdated("7"), work.is_outdated(big)) == (True, False, True)


def test_duplicate_is_pending_when_the_result_of_the_first_line_was_in_the_output(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "a"), merge=True)
    assert work.count(TWIN) == 1
    work.finish_by_id("id1")  # a crash came before the twin got this result
    work.find_twins()
    assert [each.id for each in work.next_lines("m", 9)] == ["id2"]


def test_open_output_counts_tokens_of_recovered_results_once(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": 2}
    body = {"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens": 4}}
    found = [{"id": "id1", "usage": usage}, {"custom_id": "id2", "response": {"body": body}}]
    paths = paths_of(tmp_path / "out.jsonl")
    paths.output.write_text("".join(json.dumps(value) + "\n" for value in found))
    with contextlib.closing(WorkFile(paths.work)) as work:
        for _ in range(2):
            read(work, line(1, "a"), line(2, "b"), line(3, "c"))
            open_output(work, paths, None).close()
            assert [int(work.get(name)) for name in TOKENS] == [12, 4, 6]
            assert list(work.open_lines()) == [(3, "id3")]


@pytest.mark.parametrize(("seconds", "lines"), [(0.1, 3), (0.4, 4), (20.0, 1000)])
def test_rates_include_only_the_current_command_even_when_it_is_short(seconds: float, lines: int) -> None:
    progress = Progress(total=5000, finished=100 + lines, already=100, tokens_before=990, completion_tokens=990 + 29)
    progress.started_at = time.monotonic() - seconds
    assert progress.line_rate == pytest.approx(lines / seconds, rel=0.2)
    assert progress.rate == pytest.approx(29 / seconds, rel=0.2)


def test_ordered_results_are_held_until_earlier_lines_finish(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "b"), line(3, "c"), line(4, "d"))
    first, second, third, fourth = work.next_lines("m", 4)
    work.finish(first, outcome="one")
    work.finish(third, outcome="three")
    assert work.first_open(0) == 2
    assert work.held(9, before=2) == [(1, "one")]
    work.drop_outcomes([1])
    work.finish(second, failed=True)
    assert work.first_open(2) == 4
    assert work.held(9, before=4) == [(3, "three")]
    work.finish(fourth, outcome="four")
    assert work.first_open(4) is None
    assert work.held(1) == [(3, "three")]
    assert work.held(9) == [(3, "three"), (4, "four")]


def test_held_result_is_not_written_twice_after_a_crash(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "b"))
    for each, outcome in zip(work.next_lines("m", 2), ("one", "two"), strict=True):
        work.finish(each, outcome=outcome)
    assert not work.finish_by_id("id1")  # a crash came after this file had counted the tokens
    assert work.held(9) == [(2, "two")]


def test_shrink_keeps_ids_and_states_of_finished_lines(work: WorkFile) -> None:
    read(work, *(line(i, f"{i} " * 5000) for i in range(1, 50)))
    with work.transaction():
        for each in work.next_lines("m", 49):
            work.finish(each)
    work.shrink()
    work.close()
    assert work.path.stat().st_size < 100_000
    with contextlib.closing(WorkFile(work.path)) as again:
        assert read(again, *(line(i, f"{i} " * 5000) for i in range(1, 50))) == set()
        assert again.count(FINISHED) == 49


def test_failed_line_can_be_retried_after_shrink(work: WorkFile) -> None:
    read(work, line(1, "a"), line(2, "b"))
    first, second = work.next_lines("m", 2)
    work.finish(first)
    work.finish(second, failed=True)
    work.shrink()
    read(work, line(1, "a"), line(2, "b"))
    work.retry_failed()
    assert [(each.id, each.params) for each in work.next_lines("m", 9)] == [("id2", {"prompt": "b"})]


@pytest.mark.parametrize("limit", [1024, 5000, 4 << 20])
def test_chunk_never_exceeds_the_maximum_payload_size(limit: int) -> None:
    room = min(MAX_CHUNK_BYTES, max_lines_bytes("m", limit))
    lines = [
        StoredLine(n, f"id{n}", "short", "generate", "m", {"prompt": "é" * (n * 7 % 300)}, 0, None, 0)
        for n in range(90)
    ]
    while lines:
        fitting = fitting_lines(lines, room)
        sent = [{"kind": line.kind, "params": line.params} for line in fitting]
        call = TaskCall(task="t", args=["m", sent], kwargs={"priority": 9}, queue="q", priority=9)
        check_size(call, limit)  # raises if it is too large
        lines = lines[len(fitting) :]


def test_earlier_errors_are_copied_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BatchOptions(tmp_path / "in.jsonl", tmp_path / "out.jsonl", model="m")
    count = 3 * LINES_PER_REPORT
    options.input.write_text("".join(f'{{"id": "a{n}", "prompt": "Hi"}}\n' for n in range(count)))
    paths = paths_of(options.output)
    paths.errors.write_text("".join(f'{{"id": "a{n}", "error": {{}}}}\n' for n in range(count)))
    monkeypatch.setattr(WorkFile, "has_failed", lambda work, line_id: line_id != "a7")
    sizes: list[int] = []
    append = LineFile.append
    monkeypatch.setattr(LineFile, "append", lambda file, values: (sizes.append(len(values)), append(file, values))[1])
    with contextlib.closing(WorkFile(paths.work)) as work:
        errors = read_input(work, options, paths, lambda count: None, None)
    errors.close()
    assert max(sizes) == LINES_PER_REPORT
    assert [id_of(value) for value in errors.lines()] == [f"a{n}" for n in range(count) if n != 7]
