"""The batch endpoints."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.http.context import caller_of
from cellama.api.http.files.store import unavailable
from cellama.api.http.parsing import PageQuery, read

from .runner import BatchRunner
from .service import parse_batch

BATCHES = "/v1/batches"
PAGE, MAX_PAGE = 20, 100  # as in OpenAI's API


async def create(request: Request) -> Response:
    """Handle `POST /v1/batches`."""
    parsed = await read(request)
    runner, caller = runner_of(request), parsed.caller
    order = parse_batch(parsed.body)
    await runner.files.records.find(order.input_file_id, caller)
    try:
        store_id = await runner.files.store_id()
        record = await runner.batches.create(order, caller, parsed.idempotency_key, store_id)
    except OSError as error:
        raise unavailable(error) from error
    runner.start()  # needed if the app is mounted into another one that does not run its lifespan
    return JSONResponse(await runner.batches.view(record), headers=dict(parsed.context.admission.headers))


async def retrieve(request: Request) -> Response:
    """Handle `GET /v1/batches/{id}`."""
    batches, caller = runner_of(request).batches, await caller_of(request)
    return JSONResponse(await batches.view(await batches.records.find(request.path_params["id"], caller)))


async def list_(request: Request) -> Response:
    """Handle `GET /v1/batches`."""
    batches, caller = runner_of(request).batches, await caller_of(request)
    query = PageQuery.of(request.query_params, PAGE, MAX_PAGE)
    found = await batches.records.page(caller, query)
    return JSONResponse(query.to_list([await batches.view(record) for record in found]))


async def cancel(request: Request) -> Response:
    """Handle `POST /v1/batches/{id}/cancel`."""
    batches, caller = runner_of(request).batches, await caller_of(request)
    return JSONResponse(await batches.view(await batches.cancel(request.path_params["id"], caller)))


def runner_of(request: Request) -> BatchRunner:
    """Return the gateway's batch runner."""
    runner: BatchRunner = request.app.state.batches
    return runner


ROUTES = (
    Route(BATCHES, create, methods=["POST"]),
    Route(BATCHES, list_, methods=["GET"]),
    Route(BATCHES + "/{id}", retrieve, methods=["GET"]),
    Route(BATCHES + "/{id}/cancel", cancel, methods=["POST"]),
)
