"""The names that traces use: W3C Trace Context headers, and attributes from OpenTelemetry's semantic conventions.

The conventions for generative AI may still change. These names are from semantic-conventions 0.66b (schema 1.44.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cellama.tasks.contract.all_kinds import KINDS

SCHEMA = "https://opentelemetry.io/schemas/1.44.0"
PROVIDER = "cellama"
# By task, for tasks that a model computes. The conventions define only `text_completion`, `chat` and `embeddings`.
OPERATIONS = {task: kind.operation for task, kind in KINDS.items() if kind.operation is not None}
NUMBERS = {  # attributes by parameter of a job
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
}
USAGE = {  # attributes by field of a result's usage
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}


def of_message(queue: str, operation: str, job_id: str | None) -> dict[str, Any]:
    """Return the span attributes for one job's message, or for the messages of several jobs if no job id is given."""
    attributes: dict[str, Any] = {
        "messaging.system": "celery",
        "messaging.destination.name": queue,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }
    return attributes if job_id is None else {**attributes, "messaging.message.id": job_id}


def of_request(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a request to a model. The parameters of the call may be invalid."""
    attributes: dict[str, Any] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER}
    if isinstance(parameters.get("model"), str):
        attributes["gen_ai.request.model"] = parameters["model"]
    for name, attribute in NUMBERS.items():
        if isinstance(parameters.get(name), int | float):
            attributes[attribute] = parameters[name]
    stop = parameters.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stops and isinstance(stops, list | tuple) and all(isinstance(text, str) for text in stops):
        attributes["gen_ai.request.stop_sequences"] = list(stops)
    return attributes


def of_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes for the prompt, completion and cached token counts."""
    return {attribute: usage[name] for name, attribute in USAGE.items() if name in usage}


TRACEPARENT = "traceparent"
NAMES = (TRACEPARENT, "tracestate")
MAX_HEADER_CHARS = 512  # the length that the standard requires all implementations to accept


def carried(headers: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that carry the context of a trace, or an empty dict if the context is missing or malformed."""
    found = {name: headers[name] for name in NAMES if isinstance(headers.get(name), str)}
    return found if TRACEPARENT in found and all(len(text) <= MAX_HEADER_CHARS for text in found.values()) else {}
