"""The output of a run: whole lines only, on disk before they are told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_BLOCK = 1 << 16
_ESCAPED = {code: f"\\u{code:04x}" for code in (0x7F, *range(0x80, 0xA0))}  # `json` escapes those below 0x20 itself


def json_for_terminal(text: str) -> str:
    """Return the same JSON with every control character of its strings escaped: a terminal would act on them."""
    return text.translate(_ESCAPED)


class LineFile:
    """Appends JSON lines to a file."""

    def __init__(self, path: Path, echo: int | None = None) -> None:
        """Opens or makes the file; half a line at its end, which a crash may have left, is cut off. Raises OSError.

        The open file `echo` gets the lines that are appended, too.
        """
        self.path = path
        self._echo = echo
        self._is_on_terminal = echo is not None and os.isatty(echo)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._fd, _end_of_whole_lines(self._fd))
        self.size = os.lseek(self._fd, 0, os.SEEK_END)
        self.count = 0  # lines appended by this object

    def append(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Writes lines; they are on disk when this returns. Raises OSError; nothing of them stays then."""
        if not values:
            return
        text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        data = text.encode()
        try:
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)  # half a line must not stay
            os.lseek(self._fd, self.size, os.SEEK_SET)
            raise
        self.size += len(data)
        self.count += len(values)
        if self._echo is not None:
            _write_all(self._echo, json_for_terminal(text).encode() if self._is_on_terminal else data)

    def lines(self, start: int = 0) -> Iterator[dict[str, Any]]:
        """The lines from a byte on."""
        with self.path.open("rb") as file:
            file.seek(start)
            for raw in file:
                yield json.loads(raw)

    def close(self) -> None:
        os.close(self._fd)


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _end_of_whole_lines(fd: int) -> int:
    end = os.lseek(fd, 0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        block = os.pread(fd, end - start, start)
        at = block.rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def rewrite_without(path: Path, drops: Callable[[Any], bool]) -> None:
    """Drops the lines whose ids are to go, all at once or not at all."""
    partial = path.with_name(path.name + ".part")
    with path.open("rb") as old, partial.open("wb") as new:
        for raw in old:
            if not drops(id_of(json.loads(raw))):
                new.write(raw)
        new.flush()
        os.fsync(new.fileno())
    partial.replace(path)


def id_of(value: Mapping[str, Any]) -> Any:
    """The id of a line of output, in either form."""
    return value.get("custom_id", value.get("id"))
