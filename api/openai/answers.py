"""Convert results into OpenAI responses, and into lines of OpenAI batch files."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cellama.tasks.contract.codes import message_for_clients

OBJECTS = {"chat": "chat.completion", "generate": "text_completion"}
MIN_LOGPROB = -9999.0  # OpenAI's value for a token that can't occur, because JSON has no infinity
_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")  # the text of a token whose bytes are not valid UTF-8


def fingerprint_of(digest: str) -> str:
    """Return the `system_fingerprint` for a model's answers, based on the SHA-256 of the model file."""
    return f"fp_{digest[:12]}"


def warnings_of(results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the answer's `warnings` member, which lists its jobs' warnings, such as unenforced keywords."""
    warnings = list(dict.fromkeys(warning for result in results for warning in result.get("warnings", ())))
    return {"warnings": warnings} if warnings else {}


def usage_of(usages: Sequence[Mapping[str, Any]], reasoning_tokens: int | None = None) -> dict[str, Any]:
    """Return the token counts of an answer's jobs, using OpenAI's names."""

    def total(name: str) -> int:
        return sum(usage[name] for usage in usages)

    prompt, completion = total("prompt_tokens"), total("completion_tokens")
    details = {name: total(name) for name in ("accepted_prediction_tokens", "rejected_prediction_tokens")}
    details["audio_tokens"] = 0
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": total("cached_tokens"), "audio_tokens": 0},
        "completion_tokens_details": details,
    }


def body_of(
    kind: str,
    answer_id: str,
    results: Sequence[Mapping[str, Any]],
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Return the body of a completion response, with the choices for all prompts."""
    choices = [choice for result in results for choice in (result.get("choices") or [result])]
    return {
        "id": answer_id,
        "object": OBJECTS[kind],
        "created": int(time.time()),
        "model": results[0].get("model", ""),  # missing if the job timed out before a worker started it
        "choices": [_choice(kind, index, choice) for index, choice in enumerate(choices)],
        "usage": usage_of([result["usage"] for result in results], reasoning_tokens),
        **warnings_of(results),
    }


def finish_reason_of(reason: str, calls: Sequence[Mapping[str, Any]] | None) -> str:
    """Return OpenAI's finish reason. A timed-out answer has the finish reason `length`, like a truncated answer."""
    if reason == "timeout":
        return "length"
    is_partial = any(call.get("partial") for call in calls or ())  # because of a stop string
    return "tool_calls" if calls and reason == "stop" and not is_partial else reason


def ended_in_reasoning(result: Mapping[str, Any]) -> bool:
    """Return whether a chat was cut off during its reasoning.

    The stream of a cut-off chat contains neither the end of the reasoning nor a signature.
    """
    message = result["message"]
    has_finished = result["finish_reason"] == "stop" and result.get("stop_sequence") is None
    return not (has_finished or message.get("content") or message.get("tool_calls"))


def _choice(kind: str, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    reason, logprobs = choice["finish_reason"], choice.get("logprobs")
    if kind != "chat":
        return {
            "index": index,
            "finish_reason": finish_reason_of(reason, None),
            "text": choice["text"],
            "logprobs": None if logprobs is None else text_logprobs(logprobs),
        }
    message = choice["message"]
    return {
        "index": index,
        "finish_reason": finish_reason_of(reason, message.get("tool_calls")),
        "message": _message(message),
        "logprobs": None if logprobs is None else chat_logprobs(logprobs),
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the assistant's message. The reasoning field has the same name as in DeepSeek's API and llama-server."""
    calls, reasoning = message.get("tool_calls") or [], message.get("reasoning")
    content = message["content"] or (None if calls else "")
    answer: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning is not None:
        answer["reasoning_content"] = reasoning
    return {**answer, "tool_calls": [call_of(call) for call in calls]} if calls else answer


def call_of(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call in OpenAI's format. Only the finish reason shows that a call's arguments were cut off."""
    return {name: value for name, value in call.items() if name != "partial"}


def embeddings_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response body that contains the embeddings."""
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(result["embeddings"])
    ]
    tokens = result["usage"]["prompt_tokens"]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": result["model"], "data": data, "usage": usage}


def response_of(custom_id: str | int, request_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of an output file."""
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}


def failure_of(custom_id: str | int | None, request_id: str, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of an error file."""
    failure = {"code": error["code"], "message": message_for_clients(error["code"], error["message"])}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": None, "error": failure}


# Logprobs


def bytes_of(text: str) -> bytes:
    """Return a token's bytes. In results, `bytes:\\xe2\\x82` stands for bytes that are not valid UTF-8."""
    found = _BYTES.fullmatch(text)
    return text.encode() if found is None else bytes.fromhex(found[1].replace("\\x", ""))


def chat_logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tokens' logprobs in the chat completion format."""
    content = [
        {
            **_entry(entry["text"], entry["logprob"]),
            "top_logprobs": [
                _entry(text, logprob) for text, (_, logprob) in zip(entry["top_texts"], entry["top"], strict=True)
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[Mapping[str, Any]], first_offset: int = 0) -> dict[str, Any]:
    """Return the tokens' logprobs in the completion format.

    `first_offset` is the number of characters before the tokens. As in OpenAI's API, the alternatives always include
    the sampled token, so there may be one more alternative than requested.
    """
    decoder, offset, offsets = codecs.getincrementaldecoder("utf-8")("replace"), first_offset, []
    for entry in entries:
        offsets.append(offset)
        offset += len(decoder.decode(bytes_of(entry["text"])))
    return {
        "tokens": [entry["text"] for entry in entries],
        "token_logprobs": [max(MIN_LOGPROB, entry["logprob"]) for entry in entries],
        "top_logprobs": [
            {
                text: max(MIN_LOGPROB, logprob)
                for text, (_, logprob) in (
                    *zip(entry["top_texts"], entry["top"], strict=True),
                    (entry["text"], (entry["token"], entry["logprob"])),
                )
            }
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(bytes_of(text)), "logprob": max(MIN_LOGPROB, logprob)}
