"""The OpenAI batch form: bodies of requests → parameters of jobs, and results → bodies of responses."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from cellama.tasks.contract.errors import InvalidJob

URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/embeddings": "input"}
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_RENAMED = {"max_completion_tokens": "max_tokens", "input": "texts", "encoding_format": "encoding"}
_OBJECTS = {"messages": "chat.completion", "prompt": "text_completion"}


def params_of_body(url: Any, body: Any) -> dict[str, Any]:
    """The parameters of a short line for a body. Raises InvalidJob."""
    if url not in URLS:
        raise InvalidJob(f"url is {url!r}; known: {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise InvalidJob(f"body is {type(body).__name__}, not an object")
    if URLS[url] not in body:
        raise InvalidJob(f"body.{URLS[url]} is missing")
    if body.get("stream"):
        raise InvalidJob("body.stream is true; a bulk run does not stream: leave it out")
    params: dict[str, Any] = {
        _RENAMED.get(str(name), str(name)): value for name, value in body.items() if value is not None
    }
    for name in (*_IGNORED, "stream"):
        params.pop(name, None)
    _take_response_format(params)
    _take_logprobs(params)
    if params.get("encoding") == "float":
        params["encoding"] = "list"
    return params


def _take_response_format(params: dict[str, Any]) -> None:
    wanted = params.pop("response_format", None)
    if wanted is None or wanted == {"type": "text"}:
        return
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        params["json_schema"] = {"type": "object"}
    elif kind == "json_schema" and isinstance(wanted.get("json_schema"), dict):
        params["json_schema"] = wanted["json_schema"].get("schema", {"type": "object"})
    else:
        raise InvalidJob(
            f"response_format is {json.dumps(wanted)[:80]}; its type must be text, json_object or json_schema"
        )


def _take_logprobs(params: dict[str, Any]) -> None:
    """Of a chat `logprobs` is a switch, and `top_logprobs` the number."""
    if isinstance(params.get("logprobs"), bool):
        wanted, top = params.pop("logprobs"), params.pop("top_logprobs", 0)
        if wanted:
            params["logprobs"] = top


def response_of(custom_id: str, request_id: str, kind: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an output file."""
    body = _embeddings(result) if kind == "embed" else _completion(request_id, kind, result)
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}


def failure_of(custom_id: str | None, request_id: str, error: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an error file."""
    shown = {"code": error["code"], "message": error["message"]}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": None, "error": shown}


def usage_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Token counts under the names of the OpenAI API."""
    usage = result["usage"]
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    guessed = {f"{kind}_prediction_tokens": usage[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")}
    details = {
        "prompt_tokens_details": {"cached_tokens": usage["cached_tokens"]},
        "completion_tokens_details": guessed,
    }
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}


def _completion(request_id: str, kind: str, result: Mapping[str, Any]) -> dict[str, Any]:
    choices = result.get("choices") or [{"index": 0, **result}]
    return {
        "id": request_id,
        "object": _OBJECTS["messages" if kind == "chat" else "prompt"],
        "created": int(time.time()),
        "model": result["model"],
        "choices": [_choice(kind, choice) for choice in choices],
        "usage": usage_of(result),
    }


def _choice(kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    reason = choice["finish_reason"]
    common = {"index": choice.get("index", 0), "finish_reason": "length" if reason == "timeout" else reason}
    if kind != "chat":
        return {**common, "text": choice["text"], "logprobs": choice.get("logprobs")}
    message = choice["message"]
    if message.get("tool_calls") and reason == "stop":
        common["finish_reason"] = "tool_calls"
    return {**common, "message": message, "logprobs": choice.get("logprobs")}


def _embeddings(result: Mapping[str, Any]) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(result["embeddings"])
    ]
    tokens = result["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": result["model"], "data": data, "usage": usage}
