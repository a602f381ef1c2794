"""The file endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cellama.api.http.auth import Caller
from cellama.api.http.context import caller_of, charged, context_of
from cellama.api.http.errors import ApiError
from cellama.api.http.gateway import gateway_of
from cellama.api.http.parsing import PageQuery, declared_bytes
from cellama.tasks.contract.json_values import shorten

from .records import FileQuota, Record
from .service import FileService, file_view, life_of
from .store import unavailable
from .upload import MAX_FORM_BYTES, UploadForm, receive_form

FILES = "/v1/files"
PURPOSE = "batch"
PAGE = 10_000  # default and maximum of `limit`, as in OpenAI's API
MAX_PURPOSE_CHARS = 40  # characters of a wrong purpose that an error quotes
FILE_FIELDS = ("purpose", "expires_after", "expires_after[anchor]", "expires_after[seconds]")


async def create(request: Request) -> Response:
    """Handle `POST /v1/files`."""
    caller = await charged(request)
    async with receive_upload(request, caller) as upload:
        record = await upload.store(_checked_life(upload.form))
    return JSONResponse(file_view(record), headers=dict(context_of(request).admission.headers))


async def retrieve(request: Request) -> Response:
    """Handle `GET /v1/files/{id}`."""
    files, caller = await files_and_caller(request)
    return JSONResponse(file_view(await files.records.find(request.path_params["id"], caller)))


async def content(request: Request) -> Response:
    """Handle `GET /v1/files/{id}/content`."""
    files, caller = await files_and_caller(request)
    record = await files.records.find(request.path_params["id"], caller)
    blocks = await files.blocks(record["id"])
    headers = {"content-length": str(record["bytes"])}
    return StreamingResponse(blocks, media_type="application/octet-stream", headers=headers)


async def list_(request: Request) -> Response:
    """Handle `GET /v1/files`."""
    files, caller = await files_and_caller(request)
    purpose = request.query_params.get("purpose")
    query = PageQuery.of(request.query_params, PAGE, PAGE)
    found = await files.records.page(caller, query, lambda record: purpose in (None, record["purpose"]))
    return JSONResponse(query.to_list(list(map(file_view, found))))


async def delete(request: Request) -> Response:
    """Handle `DELETE /v1/files/{id}`."""
    files, caller = await files_and_caller(request)
    record = await files.records.find(request.path_params["id"], caller)
    try:
        await asyncio.shield(files.delete(record))
    except OSError as error:
        raise unavailable(error) from None
    return JSONResponse({"id": record["id"], "object": "file", "deleted": True})


@dataclass(frozen=True, slots=True)
class ReceivedUpload:
    """A received file that is within its tenant's limits.

    The file is deleted at the end of the request unless it is stored.
    """

    form: UploadForm
    _files: FileService
    _caller: Caller
    _quota: FileQuota

    async def store(self, life_s: int) -> Record:
        """Store the file for `life_s` seconds, and return its record. Raises OSError, and ApiError (429)."""
        name = self.form.name or ""
        return await self._files.add(self.form.path, name, PURPOSE, self._caller, life_s, quota=self._quota)


@contextlib.asynccontextmanager
async def receive_upload(request: Request, caller: Caller) -> AsyncIterator[ReceivedUpload]:
    """Receive a request's form, including the uploaded file. Raises ApiError or ClientDisconnect."""
    files, settings = _files(request), gateway_of(request).settings
    quota = FileQuota(settings.gateway_tenant_files, settings.gateway_tenant_file_bytes)
    min_bytes = max(0, declared_bytes(request) - MAX_FORM_BYTES)  # size of the file at least, without other fields
    uploading = files.count_upload(caller, min_bytes, quota)
    async with uploading, receive_form(request, files.store.work_dir, settings.gateway_max_file_bytes) as form:
        yield ReceivedUpload(form, files, caller, quota)


async def files_and_caller(request: Request) -> tuple[FileService, Caller]:
    """Authenticate the caller, and return the file service and the caller. Raises ApiError."""
    return _files(request), await caller_of(request)


def _files(request: Request) -> FileService:
    files: FileService = request.app.state.batches.files
    return files


def _checked_life(form: UploadForm) -> int:
    """Check a form's fields, and return the file's lifetime in seconds. Raises ApiError."""
    fields = form.fields
    for name in fields:
        if name not in FILE_FIELDS:
            known = "file, purpose, expires_after"
            raise ApiError(400, f"unknown parameter {shorten(name)}; known parameters: {known}", param=name)
    purpose = fields.get("purpose")
    if purpose != PURPOSE:
        problem = "is missing" if purpose is None else f"is {purpose[:MAX_PURPOSE_CHARS]!r}"
        message = f"purpose {problem}; it must be {PURPOSE!r}, because the gateway only uses files for batches"
        raise ApiError(400, message, param="purpose")
    check_not_empty(form)
    return _life(fields)


def check_not_empty(form: UploadForm) -> None:
    """Raise ApiError (400) if a form's file is empty."""
    if not form.num_bytes:
        raise ApiError(400, "file is empty; send a file with requests", param="file")


def _life(fields: Mapping[str, str]) -> int:
    """Return the file's lifetime in seconds.

    Clients send the object `expires_after` either as JSON or as fields such as `expires_after[seconds]`.
    """
    value: Any = fields.get("expires_after")
    if value is not None:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    else:
        members = {name: fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
        value = {name: text for name, text in members.items() if text is not None} or None
        seconds = members["seconds"] or ""
        if seconds.isascii() and seconds.isdecimal() and len(seconds) < 9:
            value["seconds"] = int(seconds)
    return life_of(value, "expires_after")


ROUTES = (
    Route(FILES, create, methods=["POST"]),
    Route(FILES, list_, methods=["GET"]),
    Route(FILES + "/{id}", retrieve, methods=["GET"]),
    Route(FILES + "/{id}", delete, methods=["DELETE"]),
    Route(FILES + "/{id}/content", content, methods=["GET"]),
)
