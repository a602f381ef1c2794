"""How results and failures of lines are written: in the form in which the line came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.api.openai.answers import failure_of, response_of
from cellama.tasks.contract.shapes.results import with_messages

from .lines import BadLine, LineId, StoredLine
from .progress import TOKENS

_TOLD = tuple("finish_reason stop_sequence choices logprobs shapes usage model seed finish_key warnings".split())


def result_line(line: StoredLine, result: dict[str, Any]) -> dict[str, Any]:
    """A line of the output."""
    shaped: Any = with_messages(result) if line.kind == "chat" else result
    if line.form == "openai":
        return {**response_of(line.id, _request_id(line), line.kind, shaped), **_beside(line.columns)}
    names = {"generate": ("text",), "chat": ("message",), "embed": ("embeddings",)}[line.kind]
    kept = {name: shaped[name] for name in (*names, *_TOLD) if shaped.get(name) is not None}
    return {"id": line.id, **kept, **_beside(line.columns)}


def usage_of_line(value: Mapping[str, Any]) -> dict[str, int]:
    """Return the token counts in a line of the output, in either form."""
    if "response" not in value:
        usage = value.get("usage") or {}
        return {name: usage.get(name, 0) for name in TOKENS}
    usage = value["response"]["body"].get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    told = (usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0))
    return dict(zip(TOKENS, told, strict=True))


def error_line(line: StoredLine, error: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the error file for a line that was run."""
    return {**_numbered(line.form, line.number, line.id, _request_id(line), error), **_beside(line.columns)}


def bad_line(form: str, bad: BadLine) -> dict[str, Any]:
    """A line of the error file for one that could not be run at all."""
    error = {"code": "invalid_request", "message": bad.message}
    return {**_numbered(form, bad.number, bad.id, f"line_{bad.number}", error), **_beside(bad.columns)}


def _beside(columns: Mapping[str, Any]) -> dict[str, Any]:
    """What else the row of a table has had."""
    return {"columns": columns} if columns else {}


def _numbered(
    form: str, number: int, line_id: LineId | None, request_id: str, error: Mapping[str, Any]
) -> dict[str, Any]:
    if form == "openai":
        return {**failure_of(line_id, request_id, error), "line": number}
    return {"id": line_id, "line": number, "error": {"code": error["code"], "message": error["message"]}}


def _request_id(line: StoredLine) -> str:
    return f"line_{line.number}"
