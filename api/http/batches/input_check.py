"""What is wrong with a file as the input of a batch. Pure, and a line at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from cellama.api.batch.lines import raw_lines
from cellama.api.http.callers import Caller
from cellama.api.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS
from cellama.tasks.contract.json_values import shorten

ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)
MAX_ERRORS = 100  # that a batch tells; the check ends there
MAX_ID_CHARS = 512
LINES_PER_WORD = 500
_TAKEN = {"priority": "a batch is bulk work", "cache_scope": "a batch runs in its tenant's scope"}  # from lines


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for the lines of a batch, which has the rights of `caller`."""

    endpoint: str
    max_lines: int
    max_line_bytes: int
    caller: Caller = field(default_factory=Caller)


@dataclass(slots=True)
class CheckedInput:
    """What was found. `errors` are OpenAI's: code, message, param, line."""

    num_lines: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    models: set[str] = field(default_factory=set)

    @property
    def model(self) -> str | None:
        """The one that all lines name, if it is one."""
        return next(iter(self.models)) if len(self.models) == 1 else None


def check_input(stream: BinaryIO, rules: Rules, on_lines: Callable[[], None] = lambda: None) -> CheckedInput:
    """Reads to the end, or to the last error that is told. `on_lines` is called now and then, and may raise."""
    found, ids = CheckedInput(), dict[str, int]()
    for number, raw in raw_lines(stream, rules.max_line_bytes):
        if number % LINES_PER_WORD == 0:
            on_lines()
        found.num_lines += 1
        if found.num_lines > rules.max_lines:
            told = f"the file has more than {rules.max_lines} requests, which is the limit; split it"
            found.errors.append(_error("too_many_requests", told, None, None))
            break
        found.errors += [
            _error(code, told, param, number) for code, told, param in _wrong(number, raw, rules, ids, found)
        ]
        if len(found.errors) >= MAX_ERRORS:
            break
    if not found.num_lines:
        found.errors.append(_error("empty_file", "the file has no requests; is it the right one?", None, None))
    return found


Wrong = tuple[str, str, str | None]  # code, message, param


def _wrong(number: int, raw: bytes | str, rules: Rules, ids: dict[str, int], found: CheckedInput) -> Iterator[Wrong]:
    if isinstance(raw, str):
        yield "line_too_long", raw, None
        return
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        yield "invalid_json_line", f"it is no JSON: {error}", None
        return
    if not isinstance(value, dict):
        yield "invalid_json_line", f"it is {type(value).__name__}, not an object", None
        return
    yield from _wrong_id(number, value.get("custom_id"), ids)
    if value.get("method") != "POST":
        yield "invalid_method", f"method is {shorten(value.get('method'))}; it must be POST", "method"
    if value.get("url") != rules.endpoint:
        told = f"url is {shorten(value.get('url'))}; it must be that of the batch, {rules.endpoint!r}"
        yield "mismatched_endpoint", told, "url"
    if not isinstance(value.get("body"), dict):
        yield "invalid_request", f"body is {type(value.get('body')).__name__}, not an object", "body"
        return
    yield from _wrong_body(value["body"], rules, found)


def _wrong_id(number: int, custom_id: Any, ids: dict[str, int]) -> Iterator[Wrong]:
    if custom_id is None:
        yield "missing_required_parameter", "custom_id is missing; each request needs one of its own", "custom_id"
    elif not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS or not custom_id.isprintable():
        told = f"custom_id is {shorten(custom_id)}; it must be a text of 1 to {MAX_ID_CHARS} printable characters"
        yield "invalid_custom_id", told, "custom_id"
    elif (earlier := ids.setdefault(custom_id, number)) != number:
        yield "duplicate_custom_id", f"its custom_id {custom_id!r} is that of line {earlier}, too", "custom_id"


def _wrong_body(body: dict[str, Any], rules: Rules, found: CheckedInput) -> Iterator[Wrong]:
    model = body.get("model")
    if not isinstance(model, str) or not model or not model.isprintable():
        yield (
            "missing_required_parameter",
            f"body.model is {shorten(model)}; each request names its model",
            "body.model",
        )
    elif not rules.caller.may_ask(model):
        yield "model_not_allowed", f"the API key of this batch may not ask for {shorten(model)}", "body.model"
    elif len(found.models) < 2:
        found.models.add(model)
    if (adapter := rules.caller.adapter_not_allowed(body.get("adapters"))) is not None:
        told = f"the API key of this batch may not use the adapter {shorten(adapter)}"
        yield "adapter_not_allowed", told, "body.adapters"
    for name, why in _TAKEN.items():
        if body.get(name) is not None:
            yield "invalid_request", f"{name} can't be given in a batch: {why}; leave it out", f"body.{name}"


def _error(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}
