"""Hooks for schemathesis: requests stay small and reach the model, and answers may only have documented members."""

from __future__ import annotations

import os
from typing import Any

import schemathesis

FILE_ID = "TEST_FILE_ID"  # environment variable with the id of an uploaded file, for batches
MAX_TOKENS = 8
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SIZES = {**dict.fromkeys(LENGTHS, MAX_TOKENS), "n": 2, "top_logprobs": 3}


def bounded(body: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the body with a known model and file, and with a few tokens at most. Values of other types stay wrong."""
    sizes = {name: min(body[name], most) for name, most in SIZES.items() if type(body.get(name)) in (int, float)}
    length = "max_output_tokens" if path.endswith("/responses") else "max_tokens"
    generates = path.endswith(("/completions", "/responses", "/messages"))
    default = {length: MAX_TOKENS} if generates and all(body.get(name) is None for name in LENGTHS) else {}
    known = {"model": "tiny", "input_file_id": os.environ.get(FILE_ID, "file-0")}
    return {**body, **default, **sizes, **{name: known[name] for name in known if isinstance(body.get(name), str)}}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if isinstance(case.body, dict) and case.media_type == "application/json":
        case.body = bounded(case.body, case.operation.path)


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    close_answers(raw_schema)


def close_answers(document: dict[str, Any]) -> None:
    """Forbid undocumented members in all objects of answers, so that a member without a type fails the test."""
    components, seen = document["components"]["schemas"], set[str]()

    def close(node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                close(one)
        elif isinstance(node, dict):
            name = str(node.get("$ref", "")).rpartition("/")[2]
            if name in components and name not in seen:
                seen.add(name)
                close(components[name])
            if node.get("type") == "object" and "properties" in node:
                node.setdefault("additionalProperties", False)
            for one in node.values():
                close(one)

    for methods in document["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                close([media_type.get("schema") for media_type in answer.get("content", {}).values()])
