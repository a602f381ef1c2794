"""Define which error codes each kind of endpoint can return, and describe the error responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal

from cellama.api.anthropic.answers import OVERLOADED, error_object, status_for_clients
from cellama.api.http.errors import GATEWAY_CODES, RENAMED_CODES, ApiError, status_of_code
from cellama.tasks.contract.codes import CODES, Code

PHRASES = {499: "Client Closed Request", OVERLOADED: "Overloaded"}  # nginx's and Anthropic's own statuses
ErrorStyle = Literal["openai", "anthropic"]
NO_CODE = {  # errors without a code, by status
    400: "the request is invalid; the message names the parameter, its value and the remedy",
    401: "the token is missing or wrong",
    403: "without API keys, the gateway serves only this machine",
    413: "the body is too large",
    415: "the type or the encoding of the body is not supported",
}
# Codes of commands that manage workers and models, and of tasks in processes that are not workers
_NEVER_IN_REQUESTS = frozenset(
    "unknown_worker adapter_busy model_busy id_taken result_ignored manager_exists no_worker model_load_failed "
    "adapter_load_failed insufficient_memory".split()
)
REDIS = ("redis_unreachable", "redis_refused", "redis_full", "internal_error")
CALLER = ("invalid_api_key", 403, "overloaded", *REDIS)
CHANGE = (*CALLER, "origin_not_allowed")
CHARGED = (*CHANGE, "rate_limit_exceeded")
BODY = (*CHARGED, 400, 413, 415, "slow_body", "too_many_bytes")
MODEL = (*BODY, "model_not_found", "model_not_allowed", "no_worker")
JOBS: tuple[str | int, ...] = (
    *MODEL,
    *(RENAMED_CODES.get(code, code) for code in CODES if code not in _NEVER_IN_REQUESTS),
    *("adapter_not_allowed", "invalid_json_schema", "invalid_function_parameters", "idempotency_key_reused"),
)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A reason why a request can fail. `code` is None if the error has no code."""

    status: int
    meaning: str
    code: str | None = None
    style: ErrorStyle = "openai"

    @property
    def example(self) -> dict[str, Any]:
        if self.style == "anthropic":
            return error_object(self.status, self.meaning, "req_0123456789abcdef", self.code)
        return ApiError(self.status, self.meaning, code=self.code).envelope


def failures_of(reasons: Iterable[str | int], styles: Iterable[ErrorStyle]) -> dict[int, list[RequestFailure]]:
    """Return one failure for each reason and error style, grouped by HTTP status.

    A reason is an error code, or the status of an error without a code.
    """
    found: dict[int, list[RequestFailure]] = {}
    for style in styles:
        for reason in dict.fromkeys(reasons):
            failure = RequestFailure(reason, NO_CODE[reason]) if isinstance(reason, int) else _failure_of_code(reason)
            if style == "anthropic":
                status = status_for_clients(failure.status, failure.code)
                failure = replace(failure, status=status, style=style)
            found.setdefault(failure.status, []).append(failure)
    return dict(sorted(found.items()))


def _failure_of_code(code: str) -> RequestFailure:
    row: Code = GATEWAY_CODES[code] if code in GATEWAY_CODES else CODES[code]
    status = row.http_status if code in GATEWAY_CODES else status_of_code(code)
    return RequestFailure(status, row.meaning, code)


def phrase_of(status: int) -> str:
    return PHRASES.get(status) or HTTPStatus(status).phrase


def description_of(status: int, failures: Iterable[RequestFailure]) -> str:
    """Return the description of an error response, with the codes that it can contain."""
    reasons = dict.fromkeys(f"`{one.code}`: {one.meaning}." if one.code else f"{one.meaning}." for one in failures)
    return "\n\n".join([phrase_of(status), *(f"- {reason}" for reason in reasons)])
