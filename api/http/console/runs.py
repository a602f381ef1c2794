"""Start batches from uploaded files, show the progress of bulk runs, download their files, and cancel them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from cellama.api.http.auth import Caller
from cellama.api.http.background import FILES, in_thread
from cellama.api.http.batches.endpoints import runner_of
from cellama.api.http.batches.input_check import ENDPOINTS
from cellama.api.http.batches.runner import BatchRunner
from cellama.api.http.batches.service import OPEN, parse_batch
from cellama.api.http.context import charge
from cellama.api.http.errors import ApiError, not_found
from cellama.api.http.files.endpoints import check_not_empty, receive_upload
from cellama.api.http.files.records import Record
from cellama.api.http.files.service import DEFAULT_LIFE_S
from cellama.api.http.files.store import unavailable
from cellama.api.http.files.upload import UploadForm
from cellama.api.http.gateway import gateway_of
from cellama.api.http.parsing import PageQuery
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.state.bulk_runs import Batches

from .rendering import page
from .session import base_of, console_caller, is_admin
from .table_requests import MAX_TABLE_BYTES, TableRun, is_table, write_requests
from .visible import visible

RUNS = "/console/runs"
RUNS_PER_PAGE = 20
MAX_SHOWN = 20  # failed requests on the page of a run: enough to find the mistake; the rest is in the error file
MAX_FIRST_LINE_BYTES = 1 << 20  # a line with a longer prompt than this is rare, and its endpoint is then not found
ERROR_BYTES = 64 << 10  # of the error file, for the page of a run
MIN_FINISHED = 20  # requests, before the remaining time is estimated
ENDS = ("completed", "failed", "expired", "cancelled")
WINDOWS = (("1h", "1 hour"), ("24h", "24 hours"), ("7d", "7 days"))
_FILES = {"input": "input_file_id", "output": "output_file_id", "errors": "error_file_id"}


async def list_(request: Request) -> Response:
    """Handle `GET /console/runs`."""
    caller = await console_caller(request)
    return await _list_page(request, caller)


async def _list_page(request: Request, caller: Caller, problem: str = "", status: int = 200) -> Response:
    """Return the page with the caller's runs. `problem` explains why an upload was rejected."""
    runner, query = runner_of(request), PageQuery.of(request.query_params, RUNS_PER_PAGE, RUNS_PER_PAGE)
    found = await runner.batches.records.page(caller, query)
    runs = [await _run_view(runner, record) for record in found[:RUNS_PER_PAGE]]
    others = await _runs_of_others(runner, caller) if is_admin(caller) else []
    commands = await _command_runs(request) if is_admin(caller) else []
    return page(
        request,
        "runs.html",
        status=status,
        problem=problem,
        runs=runs,
        next_after=runs[-1]["id"] if len(found) > RUNS_PER_PAGE else "",
        others=others,
        commands=commands,
        is_open=any(run["is_open"] for run in (*runs, *others)) or any(run["alive"] for run in commands),
        after=query.after,
        windows=WINDOWS,
        max_table_bytes=MAX_TABLE_BYTES,
        models=sorted(model["id"] for model in await gateway_of(request).models(caller)),
        max_bytes=gateway_of(request).settings.gateway_max_file_bytes,
    )


async def _runs_of_others(runner: BatchRunner, caller: Caller) -> list[dict[str, Any]]:
    """Return the open runs of other tenants, oldest first. Only administrators see these runs."""
    ids = [batch_id for batch_id, tenant, _ in await runner.batches.open_batches() if tenant != caller.tenant]
    return [await _run_view(runner, record) for record in await runner.batches.records.read_all(ids[:RUNS_PER_PAGE])]


async def _command_runs(request: Request) -> list[dict[str, Any]]:
    """Return the latest runs of `cellama batch run`."""

    def read() -> list[dict[str, Any]]:
        with reaching_redis(), connect(gateway_of(request).settings.redis_url) as redis:
            return Batches(redis).all(2 * RUNS_PER_PAGE)

    runs = await in_thread(FILES, read)
    return [run for run in runs if not run["id"].startswith("batch_")][:RUNS_PER_PAGE]  # the others are batches


async def create(request: Request) -> Response:
    """Handle `POST /console/runs`, which stores the form's file and starts a batch with it.

    The page's script receives JSON. If the browser sends the form without the script, the response is a page.
    """
    caller, has_script = await console_caller(request), "x-console-upload" in request.headers
    try:
        record = await _create(request, await charge(request, caller))
    except ApiError as error:
        if has_script:
            raise
        return await _list_page(request, caller, error.message, error.status)
    url = f"{base_of(request)}/runs/{record['id']}"
    return JSONResponse({"url": url}, 201) if has_script else RedirectResponse(url, 303)


async def _create(request: Request, caller: Caller) -> Record:
    runner = runner_of(request)
    async with receive_upload(request, caller) as upload:
        check_not_empty(upload.form)
        if is_table(upload.form.name or ""):
            await in_thread(FILES, _convert, upload.form, gateway_of(request).settings.max_payload_bytes)
        endpoint = await in_thread(FILES, endpoint_of, upload.form.path)
        file = await upload.store(DEFAULT_LIFE_S)
    window = upload.form.fields.get("completion_window", "24h")
    order = parse_batch({"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window})
    try:
        record = await runner.batches.create(order, caller, None, await runner.files.store_id())
    except OSError as error:
        raise unavailable(error) from error
    runner.start()  # needed if the app is mounted into another one that does not run its lifespan
    return record


def _convert(form: UploadForm, max_line_bytes: int) -> None:
    """Replace an uploaded table with the requests for its rows. Raises ApiError (400 or 413) and OSError."""
    name, target = form.name or "", form.path.with_name("requests.jsonl")
    write_requests(form.path, name, TableRun.of(form.fields), target, max_line_bytes)
    form.path, form.name = target, f"{Path(name).stem}.jsonl"


def endpoint_of(path: Path) -> str:
    """Return the endpoint in the file's first request. Raises ApiError (400) and OSError."""
    with path.open("rb") as file:
        line = next((line for line in iter(lambda: file.readline(MAX_FIRST_LINE_BYTES), b"") if line.strip()), b"")
    try:
        value = json.loads(line)
        url = value["url"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ApiError(
            400,
            f"file: the first line starts with {shorten(line[:40].decode(errors='replace'))}, which is not a request; "
            "send a .csv, .tsv or .txt file, or JSON lines with custom_id, method, url and body",
            param="file",
        ) from None
    if url not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        message = f"file: the url of its first line is {shorten(url)}; it must be one of {known}"
        raise ApiError(400, message, param="file")
    return str(url)


async def show(request: Request) -> Response:
    """Handle `GET /console/runs/{id}`."""
    return await _run_page(request, "run.html")


async def progress(request: Request) -> Response:
    """Handle `GET /console/runs/{id}/progress`, the part of the page that changes."""
    return await _run_page(request, "run_progress.html")


async def cancel(request: Request) -> Response:
    """Handle `POST /console/runs/{id}/cancel`. Finished results are kept."""
    record = await _find(request)
    await runner_of(request).batches.cancel(record["id"], Caller(tenant=record["tenant"]))
    if "hx-request" in request.headers:
        return await _run_page(request, "run_progress.html")
    return RedirectResponse(f"{base_of(request)}/runs/{record['id']}", 303)


async def download(request: Request) -> Response:
    """Handle `GET /console/runs/{id}/{file}`, where `file` is input, output or errors."""
    record, runner, name = await _find(request), runner_of(request), request.path_params["file"]
    file_id = record.get(_FILES.get(name, ""))
    file = None if file_id is None else await runner.files.records.read(file_id)
    if file is None:
        raise not_found(f"{name} file of run", record["id"])
    stem = re.sub(r"\.jsonl$", "", await _file_name(runner, record))
    file_name = f"{stem}.jsonl" if name == "input" else f"{stem}-{name}.jsonl"
    headers = {
        "content-length": str(file["bytes"]),
        "content-disposition": f"attachment; filename*=UTF-8''{quote(file_name, safe='')}",
        "x-content-type-options": "nosniff",
        "cache-control": "no-store",
    }
    return StreamingResponse(await runner.files.blocks(file["id"]), headers=headers, media_type="application/jsonl")


async def _run_page(request: Request, template: str) -> Response:
    record, runner = await _find(request), runner_of(request)
    run = await _run_view(runner, record)
    failures = await _failures(runner, run["error_file_id"]) if run["error_file_id"] else []
    return page(request, template, run=run, failures=failures)


async def _find(request: Request) -> Record:
    """Return the batch whose id is in the path.

    Administrators see the batches of all tenants. Raises ApiError (404).
    """
    caller, records = await console_caller(request), runner_of(request).batches.records
    batch_id = request.path_params["id"]
    if is_admin(caller) and re.fullmatch("batch_[0-9a-f]{32}", batch_id):
        record = await records.read(batch_id)
        if record is not None:
            return record
    return await records.find(batch_id, caller)


async def _run_view(runner: BatchRunner, record: Record) -> dict[str, Any]:
    """Return a batch for display: OpenAI's batch members, the file's name, and the estimated remaining time."""
    view = await runner.batches.view(record)
    counts, started_at = view["request_counts"], view["in_progress_at"]
    num_ended, is_open = counts["completed"] + counts["failed"], view["status"] in OPEN
    elapsed_s = (await runner.batches.records.now()) - started_at if started_at and is_open else None
    remaining_s = None
    if elapsed_s and num_ended >= MIN_FINISHED and view["status"] == "in_progress":
        remaining_s = elapsed_s / num_ended * (counts["total"] - num_ended)
    ended_at = next((at for end in ENDS if (at := view.get(f"{end}_at")) is not None), None)
    return {
        **view,
        "tenant": record["tenant"],
        "name": visible(await _file_name(runner, record)),
        "is_open": is_open,
        "num_ended": num_ended,
        "ended_at": ended_at,
        "elapsed_s": elapsed_s,
        "remaining_s": remaining_s,
        "problems": [
            {**problem, "message": visible(problem["message"])} for problem in (view["errors"] or {"data": []})["data"]
        ],
    }


async def _file_name(runner: BatchRunner, record: Mapping[str, Any]) -> str:
    """Return the name of a batch's input file, or the batch's id if the file has expired."""
    file = await runner.files.records.read(record["input_file_id"])
    return str(record["id"] if file is None else file["filename"])


async def _failures(runner: BatchRunner, file_id: str) -> list[dict[str, str]]:
    """Return the ids, codes and messages of a run's first failed requests."""
    blocks = await runner.files.blocks(file_id)

    def read() -> bytes:
        data = b""
        for block in blocks:
            data += block
            if len(data) >= ERROR_BYTES:
                break
        return data

    lines = (await in_thread(FILES, read)).split(b"\n")[:-1]  # without the end of the last line, which may be cut off
    return [_failure(json.loads(line)) for line in islice(lines, MAX_SHOWN)]


def _failure(line: Mapping[str, Any]) -> dict[str, str]:
    error = line.get("error") or {}
    return {name: visible(str(text or "")) for name, text in {"id": line.get("custom_id"), **error}.items()}


ROUTES = (
    Route(RUNS, list_, methods=["GET"]),
    Route(RUNS, create, methods=["POST"]),
    Route(RUNS + "/{id}", show, methods=["GET"]),
    Route(RUNS + "/{id}/progress", progress, methods=["GET"]),
    Route(RUNS + "/{id}/cancel", cancel, methods=["POST"]),
    Route(RUNS + "/{id}/{file}", download, methods=["GET"]),
)
