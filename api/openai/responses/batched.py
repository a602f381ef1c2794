"""Convert a batch's requests for `/v1/responses` into chat parameters, and results into responses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

from .bodies import instructions_of, params_of, response_fields
from .events import ResponseEvents, journal_of_result
from .items import items_of, messages_of
from .record import ResponseRecord

_NEEDS_A_GATEWAY = ("stream", "background", "previous_response_id")


def params_of_line(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat's parameters, including its model. Raises InvalidJob."""
    for name in _NEEDS_A_GATEWAY:
        if body.get(name):
            raise InvalidJob(f"{name} is {shorten(body[name])}, but bulk runs do not support it; leave it out")
    if body.get("input") is None:
        raise InvalidJob("input is missing; send a string or a list of items")
    messages, instructions = messages_of(items_of(body["input"], "resp_")), instructions_of(body)
    params = params_of(body)
    if instructions is not None:
        messages = [{"role": "system", "content": instructions}, *messages]
    return {**params, "messages": messages, "model": body.get("model")}


def response_of_line(
    line_id: str, body: Mapping[str, Any], params: Mapping[str, Any], result: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the response.

    `body` contains the fields that the response repeats. The response is not stored by a gateway. Because a bulk run
    has no access to the model's defaults, the response shows the job defaults instead.
    """
    record = ResponseRecord(
        id=f"resp_{line_id}",
        tenant=None,
        job_id="",
        digest="",
        created_at=int(time.time()),
        model=result["model"],
        items=[],
        params=dict(params),
        shown={**response_fields(body, {}), "model": result["model"], "service_tier": "flex"},
        store=False,
    )
    events = ResponseEvents(record)
    for event in journal_of_result(result):
        events.of(event)
    return events.response()
