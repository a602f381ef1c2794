"""Test the conversion of worker errors into OpenAI's error format."""

from __future__ import annotations

import pytest

from cellama.api.http.errors import ApiError, of_code, of_worker
from cellama.api.openai.parameters import CHAT, PARAMETERS, callers_names
from cellama.api.openai.responses.parameters import RULES


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ("json_schema at #/a: 'not' can't be enforced", "response_format", "invalid_json_schema"),
        ("json_schema can't be compiled: too large", "response_format", "invalid_json_schema"),
        ("tools.0.function.parameters at #/a: no", "tools", "invalid_function_parameters"),
        ("tools.0.function.parameters.properties.a.pattern is 3: no", "tools", "invalid_function_parameters"),
        ("regex can't be compiled: no", "regex", "invalid_request"),
        ("max_tokens is 0: no", "max_tokens", "invalid_request"),
        ("the reply is nothing", None, "invalid_request"),
    ],
)
def test_worker_error_names_the_callers_parameter(message: str, param: str | None, code: str) -> None:
    error = of_worker(of_code("invalid_request", message), callers_names(PARAMETERS[CHAT], {}))
    assert (error.status, error.param, error.code) == (400, param, code)
    assert error.envelope["error"]["type"] == "invalid_request_error"


def test_worker_error_uses_parameter_names_of_the_responses_api() -> None:
    error = of_worker(of_code("invalid_request", "json_schema at #/a: no"), callers_names(RULES, {}))
    assert (error.message, error.param, error.code) == ("text at #/a: no", "text", "invalid_json_schema")


def test_other_worker_errors_are_unchanged() -> None:
    error = ApiError(409, "json_schema at #/a: no", code="grammar_changed")
    assert of_worker(error, {}) is error
