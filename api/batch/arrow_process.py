"""Read and write Parquet and Arrow files through `arrow_child`, a short-lived process that loads pyarrow."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cellama.tasks.contract.errors import InvalidJob

from .sources import Source, name_of

_CHILD = Path(__file__).with_name("arrow_child.py")
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}  # small pools


def check_pyarrow() -> None:
    """Raise InvalidJob if pyarrow is not installed."""
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidJob("missing packages: pyarrow; run `pip install 'cellama[parquet]'`")


def rows_of_arrow(source: Source, format_: str) -> Iterator[dict[str, Any]]:
    """Yield a Parquet or Arrow file's rows, with values that JSON supports. Raises InvalidJob."""
    check_pyarrow()
    number = 0
    with _child("read", {"path": str(source), "format": format_}, stdout=subprocess.PIPE) as child:
        names: list[str] | None = None
        for raw in child.stdout:
            value = json.loads(raw)
            if isinstance(value, dict):
                kind = "Parquet" if format_ == "parquet" else "Arrow"
                raise InvalidJob(f"can't read the {kind} file {name_of(source)} after row {number}: {value['error']}")
            if names is None:
                names = value
                continue
            number += 1
            yield dict(zip(names, value, strict=True))
        if child.wait():
            reason = f"the process that reads it ended with code {child.returncode} after row {number}"
            raise OSError(errno.EIO, reason, str(source))


def write_arrow(options: Mapping[str, Any], rows: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
    """Write rows to a Parquet or Arrow file, as described in `arrow_child.write`. Raises InvalidJob and OSError."""
    check_pyarrow()
    with _child("write", options, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        with contextlib.suppress(BrokenPipeError):
            for number, row in rows:
                child.stdin.write(json.dumps([number, row]).encode() + b"\n")
            child.stdin.close()
        said = child.stdout.read()
        if child.wait():
            reason = json.loads(said)["error"] if said else f"the process that writes it ended with {child.returncode}"
            raise OSError(errno.ENOSPC if "No space left" in reason else errno.EIO, reason, options["path"])


@contextlib.contextmanager
def _child(action: str, options: Mapping[str, Any], **pipes: Any) -> Iterator[Any]:
    # -P: this file's directory has modules whose names others may use
    argv = [sys.executable, "-P", str(_CHILD), action, json.dumps(options)]
    # In a session of its own, so that Ctrl-C reaches only the command, which then ends this process.
    child = subprocess.Popen(argv, env={**os.environ, **_ENVIRONMENT}, start_new_session=True, **pipes)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
