"""Results of jobs → bodies of OpenAI's responses, and lines of its batch files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cellama.tasks.contract.codes import message_for_clients

from .logprobs import of_chat, of_text

OBJECTS = {"chat": "chat.completion", "generate": "text_completion"}


def warnings_of(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the jobs behind an answer did not enforce, for the answer; nothing if they enforced everything."""
    warnings = list(dict.fromkeys(warning for result in results for warning in result.get("warnings", ())))
    return {"warnings": warnings} if warnings else {}


def usage_of(usages: Sequence[Mapping[str, Any]], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Token counts of the jobs behind an answer, under the names of the OpenAI API."""

    def total(name: str) -> int:
        return sum(usage[name] for usage in usages)

    prompt, completion = total("prompt_tokens"), total("completion_tokens")
    details = {name: total(name) for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")}
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": total("cached_tokens")},
        "completion_tokens_details": details,
    }


def body_of(
    kind: str,
    answer_id: str,
    results: Sequence[Mapping[str, Any]],
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """The body for a completion: of one job, or of one for each prompt."""
    choices = [choice for result in results for choice in (result.get("choices") or [result])]
    return {
        "id": answer_id,
        "object": OBJECTS[kind],
        "created": int(time.time()),
        "model": results[0].get("model", ""),  # no worker came to it in time
        "choices": [_choice(kind, index, choice) for index, choice in enumerate(choices)],
        "usage": usage_of([result["usage"] for result in results], reasoning_tokens),
        **warnings_of(results),
    }


def finish_reason_of(reason: str, calls: object) -> str:
    """What ran out of time is cut off as well."""
    if reason == "timeout":
        return "length"
    return "tool_calls" if calls and reason == "stop" else reason


def was_cut_in_thought(result: Mapping[str, Any]) -> bool:
    """Whether a chat ended within its thoughts: its stream tells no end of them then, and no signature."""
    message = result["message"]
    is_over = result["finish_reason"] == "stop" and result.get("stop_sequence") is None
    return not (is_over or message.get("content") or message.get("tool_calls"))


def _choice(kind: str, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    reason, logprobs = choice["finish_reason"], choice.get("logprobs")
    if kind != "chat":
        shown = None if logprobs is None else of_text(logprobs)
        return {
            "index": index,
            "finish_reason": finish_reason_of(reason, None),
            "text": choice["text"],
            "logprobs": shown,
        }
    message = choice["message"]
    return {
        "index": index,
        "finish_reason": finish_reason_of(reason, message.get("tool_calls")),
        "message": _message(message),
        "logprobs": None if logprobs is None else of_chat(logprobs),
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The assistant's turn. Its thoughts are called as DeepSeek and llama-server call them."""
    calls, thoughts = message.get("tool_calls") or [], message.get("reasoning")
    shown: dict[str, Any] = {"role": "assistant", "content": message["content"] or (None if calls else "")}
    if thoughts is not None:
        shown["reasoning_content"] = thoughts
    return {**shown, "tool_calls": [call_of(call) for call in calls]} if calls else shown


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as OpenAI shows it: only the finish reason says that its arguments were cut."""
    return {name: value for name, value in call.items() if name != "partial"}


def embeddings_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """The body for embeddings."""
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(result["embeddings"])
    ]
    tokens = result["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": result["model"], "data": data, "usage": usage}


def response_of(custom_id: str | int, request_id: str, kind: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an output file."""
    body = embeddings_of(result) if kind == "embed" else body_of(kind, request_id, [result])
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}


def failure_of(custom_id: str | int | None, request_id: str, error: Mapping[str, Any]) -> dict[str, Any]:
    """A line of an error file."""
    shown = {"code": error["code"], "message": message_for_clients(error["code"], error["message"])}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": None, "error": shown}
