"""The endpoints of batches."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.http.asking import PageAsked, read
from cellama.api.http.callers import Caller
from cellama.api.http.door import caller_of
from cellama.api.http.files.store import unavailable

from .orders import order_of
from .runner import Runner

BATCHES = "/v1/batches"
PAGE, MAX_PAGE = 20, 100  # OpenAI's


async def create(request: Request) -> Response:
    """POST /v1/batches"""
    asked = await read(request)
    runner, caller = _runner(request), asked.caller
    order = order_of(asked.body)
    await runner.shelf.records.find(order.input_file_id, caller)
    try:
        place = await runner.shelf.place()
        record = await runner.desk.create(order, caller, asked.idempotency_key, place)
    except OSError as error:
        raise unavailable(error) from error
    runner.start()  # an app that mounts this one may never have said that it begins
    return JSONResponse(await runner.desk.shown(record), headers=dict(asked.visit.admission.headers))


async def retrieve(request: Request) -> Response:
    """GET /v1/batches/{id}"""
    desk, caller = _runner(request).desk, await _caller(request)
    return JSONResponse(await desk.shown(await desk.records.find(request.path_params["id"], caller)))


async def list_(request: Request) -> Response:
    """GET /v1/batches"""
    desk, caller = _runner(request).desk, await _caller(request)
    asked = PageAsked.of(request.query_params, PAGE, MAX_PAGE)
    found = await desk.records.page(caller, asked)
    return JSONResponse(asked.shown([await desk.shown(record) for record in found]))


async def cancel(request: Request) -> Response:
    """POST /v1/batches/{id}/cancel"""
    desk, caller = _runner(request).desk, await _caller(request)
    return JSONResponse(await desk.shown(await desk.cancel(request.path_params["id"], caller)))


async def _caller(request: Request) -> Caller:
    return await caller_of(request)


def _runner(request: Request) -> Runner:
    runner: Runner = request.app.state.batches
    return runner


ROUTES = (
    Route(BATCHES, create, methods=["POST"]),
    Route(BATCHES, list_, methods=["GET"]),
    Route(BATCHES + "/{id}", retrieve, methods=["GET"]),
    Route(BATCHES + "/{id}/cancel", cancel, methods=["POST"]),
)
