"""Convert every error into an HTTP status and an OpenAI error object."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from cellama.api.openai.parameters import with_callers_names
from cellama.config.logging import event_logger
from cellama.tasks.contract.codes import Code, meaning_of, message_for_clients
from cellama.tasks.contract.errors import InvalidJob, JobError
from cellama.tasks.contract.json_values import shorten, valid_text

log = event_logger(__name__)

MAX_PARAM_CHARS = 128  # maximum length of a field's name in an error, because a client may send any text
RETRY_AFTER_S = 1.0  # for clients, if the queue has no estimate
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}
RENAMED_CODES = {"unknown_model": "model_not_found", "prompt_too_long": "context_length_exceeded"}  # OpenAI's names
_SCHEMA_CODES = {  # parameter with a schema → OpenAI's code for a schema that is invalid
    "json_schema": "invalid_json_schema",
    "response_format": "invalid_json_schema",
    "text": "invalid_json_schema",
    "tools": "invalid_function_parameters",
}
_IN_A_SCHEMA = re.compile(r"^\S+ (at #|can't be compiled)|^tools\.\d+\.function\.parameters")
# The codes of errors that the gateway itself detects. Errors of jobs have the codes in tasks/contract/codes.py.
GATEWAY_CODES: dict[str, Code] = {
    row.code: row
    for row in (
        Code("context_length_exceeded", "the prompt can never fit into a slot", 400),
        Code("invalid_json_schema", "the response format's schema is invalid", 400),
        Code("invalid_function_parameters", "the schema of a tool's parameters is invalid", 400),
        Code("invalid_api_key", "the API key is missing, invalid, revoked or expired", 401),
        Code("model_not_allowed", "the API key may not use the model", 403),
        Code("adapter_not_allowed", "the API key may not use the adapter", 403),
        Code("origin_not_allowed", "a page from another site may not use a gateway without keys", 403),
        Code("model_not_found", "no live worker serves the model", 404),
        Code("not_found", "the object does not exist, has expired, or belongs to another tenant", 404),
        Code("previous_response_not_found", "the previous response does not exist, or has expired", 404),
        Code("events_gone", "the response's events have expired", 404),
        Code("slow_body", "the body arrived too slowly", 408, retryable=True),
        Code("idempotency_key_reused", "the idempotency key was used with a different body", 409),
        Code("batch_has_ended", "the batch has ended, so it can't be cancelled", 409),
        Code("rate_limit_exceeded", "the API key has reached one of its limits", 429, retryable=True),
        Code("too_many_bytes", "the bodies of the key's requests use too much memory", 429, retryable=True),
        Code("too_many_batches", "the tenant has too many open batches", 429, retryable=True),
        Code("file_quota_exceeded", "the tenant's files exceed its quota", 429),
        Code("no_worker", "no worker is running", 503, retryable=True),
        Code("overloaded", "the gateway has too many requests, or too little memory for bodies", 503, retryable=True),
        Code("not_ready", "Redis is unreachable, or no model accepts jobs", 503, retryable=True),
        Code("not_ended", "the response is being cancelled, but has not ended", 503, retryable=True),
        Code("files_unavailable", "the file storage is not available", 503, retryable=True),
    )
}
_STATUSES = {410: 404, 504: 408}  # replaced by statuses for which clients have an exception class


class ApiError(Exception):
    """A response with a status of 400 or above.

    `message` describes the problem and the remedy, and `param` is the name of the invalid field.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Create an error. Set `retry_after_s` for statuses that clients retry automatically (429, 503 and 507)."""
        super().__init__(status, message)
        self.status = status
        self.message = valid_text(message)
        self.code = code
        self.param = None if param is None else valid_text(param[:MAX_PARAM_CHARS])
        self.retry_after_s = retry_after_s
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return dict(self._headers)
        whole_s, ms = math.ceil(self.retry_after_s), math.ceil(1000 * self.retry_after_s)
        return {**self._headers, "retry-after": str(max(1, whole_s)), "retry-after-ms": str(max(1, ms))}

    @property
    def envelope(self) -> dict[str, Any]:
        """The body of the response, or the data of an SSE event if the error occurs while streaming."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def not_found(kind: str, object_id: str) -> ApiError:
    """Return a 404 error.

    An object that has expired or belongs to another tenant causes the same error as an unknown object.
    """
    return ApiError(404, f"{kind} {shorten(object_id)} does not exist, or has expired", code="not_found")


def key_reused() -> ApiError:
    """Return the error for an idempotency key that was already used with a different request.

    The header `x-should-retry` prevents clients from retrying after this error (409).
    """
    return ApiError(
        409,
        "Idempotency-Key: the key was used with a different body; send a new key with a new body",
        code="idempotency_key_reused",
        param="Idempotency-Key",
        headers={"x-should-retry": "false"},
    )


def of_job(error: JobError) -> ApiError:
    """Return the error for a request whose job failed or could not be queued."""
    return of_code(error.code, str(error), retryable=error.retryable)


def status_of_code(code: str) -> int:
    """Return the HTTP status that the gateway uses for job errors with this code."""
    status = meaning_of(code).http_status
    return _STATUSES.get(status, status)


def of_code(code: str, message: str, *, retryable: bool = False) -> ApiError:
    """Return the error for a job's error code (docs/reference/errors.md)."""
    client_message = message_for_clients(code, message)
    if client_message != message:
        log.warning("internal error details hidden from client", code=code, detail=message)
    status = status_of_code(code)
    retry = RETRY_AFTER_S if retryable and status in (429, 503, 507) else None
    return ApiError(status, client_message, code=RENAMED_CODES.get(code, code), retry_after_s=retry)


def of_worker(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Convert a worker's error, using the caller's parameter names (see `callers_names`).

    The message changes only if the error's code is `invalid_request`.
    """
    if error.code != "invalid_request":
        return error
    message, param = with_callers_names(error.message, names)
    code = _SCHEMA_CODES.get(param or "", error.code) if _IN_A_SCHEMA.search(message) else error.code
    return ApiError(error.status, message, code=code, param=param)


def wrong(error: InvalidJob, names: Mapping[str, str]) -> ApiError:
    """Return the error for an invalid body, using the caller's parameter names."""
    message, param = with_callers_names(str(error), names)
    found = re.match(r"body\.(\w+) is missing|(\w+) is ", message)
    return ApiError(400, message, param=param or (found and (found[1] or found[2])) or None)
