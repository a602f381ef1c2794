"""Receive uploads. Multipart form data is written to disk in pieces and is never held in memory as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from cellama.api.http.background import FILES, in_thread
from cellama.api.http.errors import ApiError
from cellama.api.http.parsing import check_not_encoded, declared_bytes

from .store import make_directory, open_new, unavailable

MAX_FORM_BYTES = 64 << 10  # size of a form without its file, which is held in memory
MAX_NAME_CHARS = 255  # maximum length of a file name, as in most file systems
OLD_S = 86_400  # no upload goes without a change for a day, unless its gateway died
UPLOADS = "incoming"


@dataclass(slots=True)
class UploadForm:
    """A form's fields and the `path` of its uploaded file."""

    path: Path
    fields: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    num_bytes: int = 0


@contextlib.asynccontextmanager
async def receive_form(request: Request, work_dir: Path, limit: int) -> AsyncIterator[UploadForm]:
    """Receive a request's form, and delete the form's file when the context ends.

    Raises ApiError or ClientDisconnect.
    """
    boundary = _boundary(request)
    if declared_bytes(request) > limit + MAX_FORM_BYTES:
        raise _too_large(limit)
    directory = work_dir / UPLOADS / uuid.uuid4().hex
    try:
        await in_thread(FILES, make_directory, directory)
        reader = _FormReader(boundary, directory, limit)
        try:
            async for piece in request.stream():
                await in_thread(FILES, reader.write, piece)
            form = await in_thread(FILES, reader.end)
        finally:
            await asyncio.shield(in_thread(FILES, reader.close))
        yield form
    except OSError as error:
        raise unavailable(error) from error
    finally:
        await asyncio.shield(in_thread(FILES, shutil.rmtree, directory, True))


def sweep_uploads(work_dir: Path, now: float) -> None:
    """Delete the incomplete uploads that crashed gateways have left behind."""
    for directory in (work_dir / UPLOADS).glob("*"):
        with contextlib.suppress(OSError):
            if directory.stat().st_mtime < now - OLD_S:
                shutil.rmtree(directory, ignore_errors=True)


class _FormReader:
    """Parses a form with small fields and one file, which is written to disk.

    Any thread may call the parser's methods, but only one thread at a time.
    """

    def __init__(self, boundary: bytes, directory: Path, limit: int) -> None:
        self._limit = limit
        self._num_other_bytes = 0  # fields and the headers of parts, without the file
        self._has_ended = False
        self._header, self._headers = (bytearray(), bytearray()), dict[bytes, bytes]()
        self._field: tuple[str, bytearray] | None = None  # the current part, unless it is the file
        self._form = UploadForm(directory / "file")
        self._file = open_new(self._form.path)
        names = ("header_field", "header_value", "header_end", "headers_finished", "part_data", "part_end", "end")
        callbacks: Any = {f"on_{name}": getattr(self, f"_on_{name}") for name in names}
        self._parser = MultipartParser(boundary, callbacks)

    def write(self, piece: bytes) -> None:
        before = self._form.num_bytes
        try:
            self._parser.write(piece)
        except (FormParserError, UnicodeDecodeError) as error:
            raise ApiError(400, f"the body is not a valid form: {error}") from None
        self._num_other_bytes += len(piece) - (self._form.num_bytes - before)
        if self._num_other_bytes > MAX_FORM_BYTES:
            message = f"the form has more than {MAX_FORM_BYTES} bytes in addition to its file; send smaller fields"
            raise ApiError(413, message)

    def end(self) -> UploadForm:
        """Finish writing the file to disk, and return the form."""
        if not self._has_ended:
            raise ApiError(400, "the form ends in the middle of a part; send the whole form")
        if self._form.name is None:
            raise ApiError(400, "file is missing; send the file as a form part with a file name", param="file")
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._form

    def close(self) -> None:
        self._file.close()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _on_header_end(self) -> None:
        name, value = map(bytes, self._header)
        self._headers[name.lower()] = value
        self._header = (bytearray(), bytearray())

    def _on_headers_finished(self) -> None:
        headers, self._headers = self._headers, {}
        _, options = parse_options_header(headers.get(b"content-disposition"))
        encoding = headers.get(b"content-transfer-encoding", b"binary").lower()
        name = options.get(b"name", b"").decode()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            message = f"content-transfer-encoding of {name[:40]!r} is {encoding[:40]!r}; send it without an encoding"
            raise ApiError(400, message)
        if b"filename" not in options:
            self._field = (name, bytearray())
            return
        if name != "file" or self._form.name is not None:
            raise ApiError(
                400,
                f"the form contains a file {name[:40]!r}; it must have exactly one file, named 'file'",
                param="file",
            )
        self._form.name, self._field = _display_name(options[b"filename"]), None

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None:
            self._field[1].extend(data[start:end])
            return
        self._form.num_bytes += end - start
        if self._form.num_bytes > self._limit:
            raise _too_large(self._limit)
        self._file.write(data[start:end])

    def _on_part_end(self) -> None:
        if self._field is not None:
            self._form.fields[self._field[0]] = self._field[1].decode()
            self._field = None

    def _on_end(self) -> None:
        self._has_ended = True


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        sent = request.headers.get("content-type", "")[:80]
        raise ApiError(415, f"content-type is {sent!r}; send multipart/form-data with a boundary")
    check_not_encoded(request)
    return boundary


def _display_name(name: bytes) -> str:
    """Return the client's name for the file, which is only displayed and never used as a path."""
    last = name.decode(errors="replace").replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in last if char.isprintable())[-MAX_NAME_CHARS:] or "file.jsonl"


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"the file has more than {limit} bytes, the maximum; split it, or raise gateway_max_file_bytes"
    )
