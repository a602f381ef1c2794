"""Lines of OpenAI's batch files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.tasks.contract.codes import message_for_clients

from .answers import body_of, embeddings_of


def response_of(custom_id: str | int, request_id: str, kind: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an output file."""
    body = embeddings_of(result) if kind == "embed" else body_of(kind, request_id, [result])
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}


def failure_of(custom_id: str | int | None, request_id: str, error: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an error file."""
    shown = {"code": error["code"], "message": message_for_clients(error["code"], error["message"])}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": None, "error": shown}
