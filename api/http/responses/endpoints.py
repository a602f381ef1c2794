"""The endpoints of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.api.http.context import caller_of
from cellama.api.http.errors import ApiError
from cellama.api.http.gateway import Gateway, gateway_of
from cellama.api.http.parsing import PageQuery, read
from cellama.api.http.running import warning_headers
from cellama.api.openai.responses.parameters import RESPONSES
from cellama.api.openai.responses.record import ResponseRecord

from .creating import answer
from .reading import end_of, look, stream_of
from .store import ResponseStore

ONE = RESPONSES + "/{response_id}"
PAGE, MAX_PAGE = 20, 100  # input items


async def create(request: Request) -> Response:
    """POST /v1/responses"""
    return await answer(await read(request))


async def retrieve(request: Request) -> Response:
    """GET /v1/responses/{id}, `?stream=true&starting_after=N`"""
    gateway, record = await _named(request)
    is_stream, after = _is_stream(request), _starting_after(request)
    standing = await look(gateway, record)
    if not is_stream:
        if after is not None:
            raise ApiError(400, "starting_after is given, and stream is not true; set it", param="starting_after")
        return JSONResponse(standing.response, headers=warning_headers(standing.response))
    if not standing.is_whole:
        raise ApiError(
            404,
            f"the events of {record.id} are gone: they are kept for {gateway.settings.event_ttl_s} s after the end "
            "(event_ttl_s); retrieve it without stream",
            code="events_gone",
            param="stream",
        )
    return stream_of(gateway, record, -1 if after is None else after)


async def cancel(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: of one that has ended nothing changes."""
    gateway, record = await _named(request)
    if not record.background:
        raise ApiError(
            400, f"{record.id} is no background response; close the connection of its request", param="response_id"
        )
    standing = await look(gateway, record)
    if not standing.has_ended:
        await gateway.client.cancel(record.job_id)
        standing = await end_of(gateway, record)
    return JSONResponse(standing.response)


async def delete(request: Request) -> Response:
    """DELETE /v1/responses/{id}: one that goes on is cancelled."""
    gateway, record = await _named(request)
    try:
        standing = await look(gateway, record)
        if not standing.has_ended:
            await gateway.client.cancel(record.job_id)
            standing = await end_of(gateway, record)
        if not standing.has_ended:
            raise ApiError(
                503, f"{record.id} is cancelled, but has not ended yet; ask again", code="not_ended", retry_after_s=1.0
            )
    except ApiError as error:
        if error.status != 404:  # else nothing is left but the record
            raise
    await ResponseStore(gateway).forget(record)
    return JSONResponse({"id": record.id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items"""
    gateway, record = await _named(request)
    await look(gateway, record)
    return JSONResponse(page_of(record.items, request.query_params))


async def _named(request: Request) -> tuple[Gateway, ResponseRecord]:
    """The response that the path names. Raises ApiError (404) unless it is the caller's."""
    gateway = gateway_of(request)
    caller = await caller_of(request)
    return gateway, await ResponseStore(gateway).read(request.path_params["response_id"], caller)


def _is_stream(request: Request) -> bool:
    wanted = request.query_params.get("stream", "false").lower()
    if wanted not in ("true", "false", "1", "0"):
        raise ApiError(400, f"stream is {wanted[:40]!r}; it must be true or false", param="stream")
    return wanted in ("true", "1")


def _starting_after(request: Request) -> int | None:
    wanted = request.query_params.get("starting_after")
    if wanted is None:
        return None
    if not (wanted.isascii() and wanted.isdecimal() and len(wanted) < 16):
        raise ApiError(
            400,
            f"starting_after is {wanted[:40]!r}; it must be a sequence_number, 0 or above",
            param="starting_after",
        )
    return int(wanted)


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """As `PageQuery` says. Raises ApiError (400)."""
    page = PageQuery.of(query, PAGE, MAX_PAGE)
    listed = list(items) if page.order == "asc" else list(items)[::-1]
    if (after := page.after) is not None:
        places = [place for place, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise ApiError(400, f"after is {after[:64]!r}, and no item has this id", param="after")
        listed = listed[places[0] + 1 :]
    return page.shown(listed)


ROUTES = (
    Route(RESPONSES, create, methods=["POST"]),
    Route(ONE, retrieve, methods=["GET"]),
    Route(ONE, delete, methods=["DELETE"]),
    Route(ONE + "/cancel", cancel, methods=["POST"]),
    Route(ONE + "/input_items", input_items, methods=["GET"]),
)
