"""What is wrong with a file as the input of a batch. Pure, and a line at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cellama.api.batch.lines import BadLine
from cellama.api.http.auth import Caller
from cellama.api.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS)
MAX_ERRORS = 100  # enough to find what is wrong with the program that wrote the file
MAX_ID_CHARS = 512  # an id is repeated in each result
_TAKEN = {"priority": "a batch is bulk work", "cache_scope": "a batch runs in its tenant's scope"}
Wrong = tuple[str, str, str | None]  # code, message, param
OnEnd = Callable[[int, str | None], None]


class InputRefused(InvalidJob):
    """Nothing of a batch is run: its input has errors, or it was cancelled while the input was read."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        """`errors` are OpenAI's: code, message, param, line."""
        super().__init__(f"the input has {len(errors)} errors")
        self.errors = errors


class InputCheck:
    """Checks what OpenAI's batches ask of each line, while a run reads its input.

    What is wrong with the file refuses all of it. What is wrong with the parameters of a request is for the run, which
    puts it into the error file.
    """

    def __init__(self, endpoint: str, max_lines: int, caller: Caller, on_end: OnEnd) -> None:
        """The batch has the rights of `caller`. Once an input without errors is read, `on_end` gets the number of
        requests, and their model if all of them name the same."""
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._caller = caller
        self._on_end = on_end
        self._num_lines = 0
        self._errors: list[dict[str, Any]] = []
        self._models: set[str] = set()
        self._ids: dict[str, int] = {}  # with the numbers of their lines

    def line(self, number: int, value: dict[str, Any] | BadLine) -> None:
        """Check a line. Raises InputRefused if there are too many errors, or lines."""
        self._num_lines += 1
        if self._num_lines > self._max_lines:
            message = f"the file has more than {self._max_lines} requests, which is the limit; split it"
            self._add(("too_many_requests", message, None), None)
            raise InputRefused(self._errors)
        wrong = iter([(value.code, value.message, None)]) if isinstance(value, BadLine) else self._wrong(number, value)
        for one in wrong:
            self._add(one, number)
        if len(self._errors) >= MAX_ERRORS:
            raise InputRefused(self._errors)

    def end(self) -> None:
        """The whole input is read. Raises InputRefused if it has errors."""
        if not self._num_lines:
            self._add(("empty_file", "the file has no requests; is it the right one?", None), None)
        if self._errors:
            raise InputRefused(self._errors)
        self._on_end(self._num_lines, next(iter(self._models)) if len(self._models) == 1 else None)

    def _add(self, wrong: Wrong, line: int | None) -> None:
        code, message, param = wrong
        self._errors.append({"code": code, "message": message, "param": param, "line": line})

    def _wrong(self, number: int, value: dict[str, Any]) -> Iterator[Wrong]:
        yield from self._wrong_id(number, value.get("custom_id"))
        if value.get("method") != "POST":
            yield "invalid_method", f"method is {shorten(value.get('method'))}; it must be POST", "method"
        if value.get("url") != self._endpoint:
            message = f"url is {shorten(value.get('url'))}; it must be that of the batch, {self._endpoint!r}"
            yield "mismatched_endpoint", message, "url"
        if isinstance(value.get("body"), dict):
            yield from self._wrong_body(value["body"])
        else:
            yield "invalid_request", f"body is {type(value.get('body')).__name__}, not an object", "body"

    def _wrong_id(self, number: int, custom_id: Any) -> Iterator[Wrong]:
        if custom_id is None:
            message = "custom_id is missing; each request needs one of its own"
            yield "missing_required_parameter", message, "custom_id"
        elif not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS or not custom_id.isprintable():
            message = f"custom_id is {shorten(custom_id)}; it must have 1 to {MAX_ID_CHARS} printable characters"
            yield "invalid_custom_id", message, "custom_id"
        elif (earlier := self._ids.setdefault(custom_id, number)) != number:
            yield "duplicate_custom_id", f"custom_id {custom_id!r} is also that of line {earlier}", "custom_id"

    def _wrong_body(self, body: dict[str, Any]) -> Iterator[Wrong]:
        model = body.get("model")
        if not isinstance(model, str) or not model or not model.isprintable():
            message = f"body.model is {shorten(model)}; each request names its model"
            yield "missing_required_parameter", message, "body.model"
        elif not self._caller.may_ask(model):
            yield "model_not_allowed", f"the API key of this batch may not ask for {shorten(model)}", "body.model"
        elif len(self._models) < 2:
            self._models.add(model)
        if (adapter := self._caller.adapter_not_allowed(body.get("adapters"))) is not None:
            message = f"the API key of this batch may not use the adapter {shorten(adapter)}"
            yield "adapter_not_allowed", message, "body.adapters"
        for name, why in _TAKEN.items():
            if body.get(name) is not None:
                yield "invalid_request", f"{name} can't be given in a batch: {why}; leave it out", f"body.{name}"
