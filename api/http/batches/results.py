"""What a run leaves behind: counts, usage, and the files that clients get. Blocks; may be done again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellama.api.batch.start import Paths
from cellama.api.batch.work import WorkFile
from cellama.api.http.files.store import open_new
from cellama.api.openai.batch_lines import failure_of

EXPIRED = {"code": "batch_expired", "message": "the completion window was over before this request had its answer"}


@dataclass(frozen=True, slots=True)
class Results:
    """Files with nothing in them are None."""

    output: Path | None
    errors: Path | None
    counts: dict[str, int]
    usage: dict[str, Any]


def results_of(paths: Paths, total: int, ends_as: str) -> Results:
    """Raises OSError, sqlite3.OperationalError."""
    num_completed, usage = _read_output(paths.output)
    errors, num_failed = _write_errors(paths, ends_as)
    counts = {"total": total, "completed": num_completed, "failed": num_failed}
    return Results(paths.output if num_completed else None, errors if num_failed else None, counts, usage)


def _read_output(output: Path) -> tuple[int, dict[str, Any]]:
    count, read, cached, written, reasoned = 0, 0, 0, 0, 0
    for line in _lines(output):
        usage = json.loads(line)["response"]["body"].get("usage") or {}
        count += 1
        read += usage.get("prompt_tokens", 0)
        written += usage.get("completion_tokens", 0)
        cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        reasoned += (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return count, {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": read + written,
    }


def _write_errors(paths: Paths, ends_as: str) -> tuple[Path, int]:
    """The run's errors, and those of requests for which there was no time: if a run that had completed is done again,
    on another machine, that may be so, too. Written anew each time."""
    target = paths.errors.with_name("errors.final.jsonl")
    with open_new(target) as file:
        if paths.errors.exists():
            with paths.errors.open("rb") as errors:
                shutil.copyfileobj(errors, file)
        if ends_as != "cancelled":
            with contextlib.closing(WorkFile(paths.work)) as work:
                for number, line_id in work.open_lines():
                    failure = {**failure_of(line_id, f"line_{number}", EXPIRED), "line": number}
                    file.write((json.dumps(failure, ensure_ascii=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    return target, sum(1 for _ in _lines(target))


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file
