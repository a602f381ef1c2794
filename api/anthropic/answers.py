"""Results of jobs → Anthropic's messages, and errors → its envelope."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cellama.api.openai.answers import warnings_of, was_cut_in_thought

_CLOSING = {"{": "}", "[": "]"}
_MOST = 8  # places to try: the last ones may be behind a name without a value


def completed(text: str) -> str:
    """The text with what is open closed, after the last member that is known: `{"a": [1, {"b": "c` is `{"a": [1, {}]}`.

    A text value is only known once it ends. Returns `{}` if nothing is known.
    """
    places: list[tuple[int, str]] = []  # after which it may be closed, and how
    open_, in_text, at = "", False, 0
    while at < len(text):
        char = text[at]
        if in_text:
            at += char == "\\"
            in_text = char != '"'
        elif char == '"':
            in_text = True
        elif char in _CLOSING:
            open_ += _CLOSING[char]
        elif open_ and char == open_[-1]:
            open_ = open_[:-1]
        at += 1
        if not in_text and (char in '{["]}' or text[at : at + 1] in (",", "]", "}")):
            places.append((at, open_[::-1]))
    tried = (text[:at] + closing for at, closing in reversed(places[-_MOST:]))
    return next((closed for closed in tried if _is_object(closed)), "{}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


CALL_PREFIX = "toolu_"
NO_THREADS = "thread_unsupported_request"  # for this the client's tool runner sends the whole conversation instead
TIERS = {"flex": "batch", "default": "standard", "priority": "priority"}  # as its usage calls them
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "api_error",
    503: "overloaded_error",
}


def envelope(status: int, message: str, request_id: str, code: str | None = None) -> dict[str, Any]:
    """The body of an answer that failed, and the data of an event `error` in mid-stream."""
    error: dict[str, Any] = {"type": _ERRORS.get(status, "api_error"), "message": message}
    if code == NO_THREADS:
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


def usage_of(usage: Mapping[str, Any], thinking_tokens: int = 0) -> dict[str, Any]:
    """What was read from a cache is not among its input tokens, unlike OpenAI's. Whatever is read is kept as well, and
    that costs nothing, so no token counts as written."""
    cached = usage["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def stop_of(end: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Why a job has ended: of a result, or of the event `done`. What ran out of time is cut off as well."""
    reason, sequence = end["finish_reason"], end.get("stop_sequence")
    if reason == "stop":
        if end.get("tool_calls"):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn" if sequence is None else "stop_sequence", "stop_sequence": sequence}
    is_full = reason == "length" and end["usage"]["completion_tokens"] < max_tokens
    return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}


def begun(message_id: str, model: str, usage: Mapping[str, Any]) -> dict[str, Any]:
    """A message of which nothing is said yet."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": dict(usage),
    }


def message_of(
    message_id: str,
    result: Mapping[str, Any],
    *,
    max_tokens: int,
    tier: str,
    thinking_tokens: int = 0,
    shows_thoughts: bool = True,
) -> dict[str, Any]:
    """The body of an answer that comes all at once."""
    said = result["message"]
    content: list[dict[str, Any]] = []
    if said.get("reasoning") is not None:
        signature = "" if was_cut_in_thought(result) else said.get("signature") or ""
        content.append(thought_of(said["reasoning"], signature, shows_thoughts))
    if said.get("content"):
        content.append({"type": "text", "text": said["content"]})
    calls = said.get("tool_calls") or []
    content += calls_of(calls)
    usage = {**usage_of(result["usage"], thinking_tokens), "service_tier": TIERS[tier]}
    end = stop_of({**result, "tool_calls": calls}, max_tokens)
    return {**begun(message_id, result.get("model", ""), usage), "content": content, **end, **warnings_of([result])}


def thought_of(text: str, signature: str, is_shown: bool) -> dict[str, Any]:
    """One that is not shown has no signature, which would be that of another text."""
    return {"type": "thinking", "thinking": text if is_shown else "", "signature": signature if is_shown else ""}


def calls_of(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls of tools as blocks."""
    return [
        {
            "type": "tool_use",
            "id": CALL_PREFIX + call["id"],
            "name": call["function"]["name"],
            "input": _input_of(call["function"]["arguments"], is_partial=bool(call.get("partial"))),
        }
        for call in calls
    ]


def _input_of(arguments: str, *, is_partial: bool) -> dict[str, Any]:
    """An object: of partial arguments, what is known of them, as Anthropic's SDK reads the deltas of a stream.

    Arguments that could not be sent as one (1e999, half of a surrogate pair) are left as text.
    """
    if is_partial:
        arguments = completed(arguments)
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"value": value}
