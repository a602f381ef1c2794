"""Validate a batch's input file line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from cellama.api.batch.lines import BadLine
from cellama.api.http.auth import Caller
from cellama.api.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS
from cellama.api.openai.reranking import RERANK
from cellama.api.openai.responses.parameters import RESPONSES
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.names import model_named

ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, RERANK)
MAX_ERRORS = 100  # enough to find the mistake in the program that wrote the file
MAX_ID_CHARS = 512  # because each result repeats the id of its request
_RESERVED = {"priority": "a batch is bulk work", "cache_scope": "a batch runs in the scope of its tenant"}
Problem = tuple[str, str, str | None]  # code, message, param
OnComplete = Callable[[int, str | None], None]


class InputRefused(InvalidJob):
    """The batch can't run because its input has errors, or because the batch was cancelled during input validation."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        """Create the error.

        Each entry in `errors` has the members of OpenAI's error format: code, message, param and line.
        """
        super().__init__(f"the input has {len(errors)} errors")
        self.errors = errors


class InputCheck:
    """Validates each line of an input while a run is reading it.

    An error in the file itself, such as a repeated `custom_id`, causes the whole file to be rejected. If only the
    parameters of a request are invalid, the run writes an error for this request to the error file.
    """

    def __init__(self, endpoint: str, max_lines: int, caller: Caller, on_complete: OnComplete) -> None:
        """Create a check that allows only the models and adapters that `caller` may use.

        If the input has no errors, `on_complete` is called with the number of requests, and with their model if all
        requests use the same model.
        """
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._caller = caller
        self._on_complete = on_complete
        self._num_lines = 0
        self._errors: list[dict[str, Any]] = []
        self._models: set[str] = set()
        self._ids: dict[str, int] = {}  # id → number of its line

    def line(self, number: int, value: dict[str, Any] | BadLine) -> None:
        """Check a line. Raises InputRefused if there are too many errors or lines."""
        self._num_lines += 1
        if self._num_lines > self._max_lines:
            message = f"the file has more than {self._max_lines} requests, the maximum; split it"
            self._add(("too_many_requests", message, None), None)
            raise InputRefused(self._errors)
        if isinstance(value, BadLine):
            self._add((value.code, value.message, None), number)
        else:
            for problem in self._problems(number, value):
                self._add(problem, number)
        if len(self._errors) >= MAX_ERRORS:
            raise InputRefused(self._errors)

    def end(self) -> None:
        """Finish the check after the last line. Raises InputRefused if errors were found."""
        if not self._num_lines:
            self._add(("empty_file", "the file has no requests; check that it is the right file", None), None)
        if self._errors:
            raise InputRefused(self._errors)
        self._on_complete(self._num_lines, next(iter(self._models)) if len(self._models) == 1 else None)

    def _add(self, problem: Problem, line: int | None) -> None:
        code, message, param = problem
        self._errors.append({"code": code, "message": message, "param": param, "line": line})

    def _problems(self, number: int, value: dict[str, Any]) -> Iterator[Problem]:
        yield from self._id_problems(number, value.get("custom_id"))
        if value.get("method") != "POST":
            yield "invalid_method", f"method is {shorten(value.get('method'))}; it must be POST", "method"
        if value.get("url") != self._endpoint:
            message = f"url is {shorten(value.get('url'))}; it must be the endpoint of the batch, {self._endpoint!r}"
            yield "mismatched_endpoint", message, "url"
        if isinstance(value.get("body"), dict):
            yield from self._body_problems(value["body"])
        else:
            yield "invalid_request", f"body is {type(value.get('body')).__name__}; it must be an object", "body"

    def _id_problems(self, number: int, custom_id: Any) -> Iterator[Problem]:
        if custom_id is None:
            message = "custom_id is missing; each request must have a unique custom_id"
            yield "missing_required_parameter", message, "custom_id"
        elif not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS or not custom_id.isprintable():
            message = f"custom_id is {shorten(custom_id)}; it must have 1 to {MAX_ID_CHARS} printable characters"
            yield "invalid_custom_id", message, "custom_id"
        elif (earlier := self._ids.setdefault(custom_id, number)) != number:
            message = f"custom_id {custom_id!r} is also used in line {earlier}; make it unique"
            yield "duplicate_custom_id", message, "custom_id"

    def _body_problems(self, body: dict[str, Any]) -> Iterator[Problem]:
        model = body.get("model")
        model = model_named(model) if isinstance(model, str) else model
        if not isinstance(model, str) or not model or not model.isprintable():
            message = f"body.model is {shorten(model)}; each request must name its model"
            yield "missing_required_parameter", message, "body.model"
        elif not self._caller.may_use_model(model):
            message = f"the API key of this batch may not use the model {shorten(model)}; use another model or key"
            yield "model_not_allowed", message, "body.model"
        elif len(self._models) < 2:
            self._models.add(model)
        if (adapter := self._caller.adapter_not_allowed(body.get("adapters"))) is not None:
            message = f"the API key of this batch may not use the adapter {shorten(adapter)}; leave it out"
            yield "adapter_not_allowed", message, "body.adapters"
        for name, reason in _RESERVED.items():
            if body.get(name) is not None:
                yield "invalid_request", f"{name} can't be set, because {reason}; leave it out", f"body.{name}"
