"""Convert job results into Anthropic messages, and errors into Anthropic's error format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cellama.api.openai.answers import ended_in_reasoning, warnings_of

_CLOSING = {"{": "}", "[": "]"}
_MAX_TRIES = 8  # positions to try from the end, because the last ones may follow a name without a value


def completed(text: str) -> str:
    """Close truncated JSON after its last complete member: `{"a": [1, {"b": "c` becomes `{"a": [1, {}]}`.

    A truncated string is dropped. Return `{}` if the JSON has no complete member.
    """
    positions: list[tuple[int, str]] = []  # where the text may be closed, and the closing brackets
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
            positions.append((at, open_[::-1]))
    candidates = (text[:at] + closing for at, closing in reversed(positions[-_MAX_TRIES:]))
    return next((candidate for candidate in candidates if _is_object(candidate)), "{}")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


CALL_PREFIX = "toolu_"
NO_THREADS = "thread_unsupported_request"  # with this code, the client's tool runner sends the whole conversation
TIERS = {"flex": "batch", "default": "standard", "priority": "priority"}  # our tier → Anthropic's name in the usage
OVERLOADED = 529  # Anthropic's status for an overloaded server, for which its clients have an exception
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
    OVERLOADED: "overloaded_error",
}
_OVERLOADED_CODES = ("overloaded", "queue_full")  # the load of the server, not the limits of the caller


def status_for_clients(status: int, code: str | None) -> int:
    """Return the HTTP status that Anthropic's API uses for this error."""
    return OVERLOADED if code in _OVERLOADED_CODES else status


def error_object(status: int, message: str, request_id: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error response, or the data of an `error` event if the stream has started."""
    kind = _ERRORS.get(status_for_clients(status, code), "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if code == NO_THREADS:
        error["details"] = {"error_code": code, "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": request_id}


def usage_of(usage: Mapping[str, Any], thinking_tokens: int = 0) -> dict[str, Any]:
    """Return the token counts. Unlike in OpenAI's format, `input_tokens` excludes cached tokens.

    Caching is automatic and free, so no tokens are reported as cache writes.
    """
    cached = usage["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
    }


def stop_of(end: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the stop reason for a result or a `done` event.

    The stop reason for a timed-out answer is `max_tokens`, as for a truncated answer.
    """
    reason, sequence = end["finish_reason"], end.get("stop_sequence")
    if reason == "stop":
        if end.get("tool_calls"):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn" if sequence is None else "stop_sequence", "stop_sequence": sequence}
    is_full = reason == "length" and end["usage"]["completion_tokens"] < max_tokens
    return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}


def empty_message(message_id: str, model: str, usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with empty content."""
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
    shows_reasoning: bool = True,
) -> dict[str, Any]:
    """Return the body of a non-streaming response."""
    answer = result["message"]
    content: list[dict[str, Any]] = []
    if answer.get("reasoning") is not None:
        signature = "" if ended_in_reasoning(result) else answer.get("signature") or ""
        content.append(thinking_block(answer["reasoning"], signature, shows_reasoning))
    if answer.get("content"):
        content.append({"type": "text", "text": answer["content"]})
    calls = answer.get("tool_calls") or []
    content += calls_of(calls)
    usage = {**usage_of(result["usage"], thinking_tokens), "service_tier": TIERS[tier]}
    end = stop_of({**result, "tool_calls": calls}, max_tokens)
    message = empty_message(message_id, result.get("model", ""), usage)
    return {**message, "content": content, **end, **warnings_of([result])}


def thinking_block(text: str, signature: str, is_shown: bool) -> dict[str, Any]:
    """Return a reasoning block.

    If the text is hidden, the signature is hidden as well, because a signature is valid only for its text.
    """
    return {"type": "thinking", "thinking": text if is_shown else "", "signature": signature if is_shown else ""}


def calls_of(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tool calls as blocks."""
    return [
        {
            "type": "tool_use",
            "id": CALL_PREFIX + call["id"],
            "name": call["function"]["name"],
            "input": input_of(call["function"]["arguments"], is_partial=bool(call.get("partial"))),
        }
        for call in calls
    ]


def input_of(arguments: str, *, is_partial: bool) -> dict[str, Any]:
    """Return a call's arguments as an object. Partial arguments are completed as in Anthropic's SDK.

    Other values, and the text of arguments that JSON can't represent (1e999, a lone surrogate), become `{"value": …}`.
    """
    if is_partial:
        arguments = completed(arguments)
    try:
        value = json.loads(arguments or "{}")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"value": value}
