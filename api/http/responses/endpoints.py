"""The endpoints under `/v1/responses`."""

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
from cellama.api.openai.responses.parameters import COMPACT, INPUT_TOKENS, RESPONSES
from cellama.api.openai.responses.record import ResponseRecord

from .conversations import compact, count_tokens
from .creating import answer
from .reading import end_of, status_of, stream_of
from .store import ResponseStore

ONE = RESPONSES + "/{response_id}"
PAGE, MAX_PAGE = 20, 100  # input items


async def create(request: Request) -> Response:
    """Handle `POST /v1/responses`."""
    return await answer(await read(request))


async def count_input_tokens(request: Request) -> Response:
    """Handle `POST /v1/responses/input_tokens`."""
    return await count_tokens(await read(request))


async def compact_conversation(request: Request) -> Response:
    """Handle `POST /v1/responses/compact`."""
    return await compact(await read(request))


async def retrieve(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}`, including `?stream=true&starting_after=N`."""
    gateway, record = await _requested(request)
    is_stream, after = _is_stream(request), _starting_after(request)
    status = await status_of(gateway, record)
    if not is_stream:
        if after is not None:
            raise ApiError(400, "starting_after requires stream=true; add stream=true", param="starting_after")
        return JSONResponse(status.response, headers=warning_headers(status.response))
    if not status.has_all_events:
        raise ApiError(
            404,
            f"stream: the events of {record.id} expired {gateway.settings.event_ttl_s} s after the response ended "
            "(event_ttl_s); retrieve the response without stream",
            code="events_gone",
            param="stream",
        )
    return stream_of(gateway, record, -1 if after is None else after)


async def cancel(request: Request) -> Response:
    """Handle `POST /v1/responses/{id}/cancel`. Cancelling a finished response has no effect."""
    gateway, record = await _requested(request)
    if not record.background:
        raise ApiError(
            400,
            f"{record.id} is not a background response; to cancel it, close its request's connection",
            param="response_id",
        )
    status = await status_of(gateway, record)
    if not status.has_ended:
        await gateway.client.cancel(record.job_id)
        status = await end_of(gateway, record)
    return JSONResponse(status.response)


async def delete(request: Request) -> Response:
    """Handle `DELETE /v1/responses/{id}`. A response in progress is cancelled first."""
    gateway, record = await _requested(request)
    try:
        status = await status_of(gateway, record)
        if not status.has_ended:
            await gateway.client.cancel(record.job_id)
            status = await end_of(gateway, record)
        if not status.has_ended:
            raise ApiError(
                503,
                f"{record.id} is being cancelled, but has not ended yet; retry shortly",
                code="not_ended",
                retry_after_s=1.0,
            )
    except ApiError as error:
        if error.status != 404:  # else only the record remains
            raise
    await ResponseStore(gateway).delete(record)
    return JSONResponse({"id": record.id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """Handle `GET /v1/responses/{id}/input_items`."""
    gateway, record = await _requested(request)
    await status_of(gateway, record)
    return JSONResponse(page_of(record.items, request.query_params))


async def _requested(request: Request) -> tuple[Gateway, ResponseRecord]:
    """Return the gateway, and the response whose id is in the path.

    Raises ApiError (404) if the response does not belong to the caller.
    """
    gateway = gateway_of(request)
    caller = await caller_of(request)
    return gateway, await ResponseStore(gateway).read(request.path_params["response_id"], caller)


def _is_stream(request: Request) -> bool:
    value = request.query_params.get("stream", "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise ApiError(400, f"stream is {value[:40]!r}; it must be true or false", param="stream")
    return value in ("true", "1")


def _starting_after(request: Request) -> int | None:
    value = request.query_params.get("starting_after")
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        raise ApiError(
            400,
            f"starting_after is {value[:40]!r}; it must be a sequence_number of 0 or more",
            param="starting_after",
        )
    return int(value)


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of the items. Raises ApiError (400)."""
    page = PageQuery.of(query, PAGE, MAX_PAGE)
    listed = list(items) if page.order == "asc" else list(items)[::-1]
    if (after := page.after) is not None:
        indices = [index for index, item in enumerate(listed) if item["id"] == after]
        if not indices:
            raise ApiError(
                400, f"after is {after[:64]!r}, but no item has that id; use an id from the list", param="after"
            )
        listed = listed[indices[0] + 1 :]
    return page.to_list(listed)


ROUTES = (
    Route(RESPONSES, create, methods=["POST"]),
    Route(INPUT_TOKENS, count_input_tokens, methods=["POST"]),
    Route(COMPACT, compact_conversation, methods=["POST"]),
    Route(ONE, retrieve, methods=["GET"]),
    Route(ONE, delete, methods=["DELETE"]),
    Route(ONE + "/cancel", cancel, methods=["POST"]),
    Route(ONE + "/input_items", input_items, methods=["GET"]),
)
