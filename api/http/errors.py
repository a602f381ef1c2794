"""The one place where something that went wrong becomes a status and OpenAI's error envelope."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from cellama.api.openai.parameters import in_callers_words
from cellama.tasks.contract.codes import meaning_of, message_for_clients
from cellama.tasks.contract.errors import InvalidJob, JobError
from cellama.tasks.contract.json_values import shorten, valid_text

log = logging.getLogger(__name__)

MAX_PARAM_CHARS = 128  # of a field's name in an error: a client may send any text as a name
RETRY_AFTER_S = 1.0  # for clients, where the queue has no estimate
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
_CODES = {"unknown_model": "model_not_found", "prompt_too_long": "context_length_exceeded"}  # as OpenAI calls them
_SCHEMA_CODES = {  # as OpenAI calls what is wrong with the schema in such a parameter
    "json_schema": "invalid_json_schema",
    "response_format": "invalid_json_schema",
    "text": "invalid_json_schema",
    "tools": "invalid_function_parameters",
}
_IN_A_SCHEMA = re.compile(r"^\S+ (at #|can't be compiled)|^tools\.\d+\.function\.parameters")
_STATUSES = {410: 404, 504: 408}  # statuses for which clients have an exception class of their own


class ApiError(Exception):
    """An answer with a status of 400 or above. `message` names value and remedy, `param` the field that is wrong."""

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
        """`retry_after_s` is for clients that ask again by themselves (429, 503, 507)."""
        super().__init__(status, message)
        self.status = status
        self.message = valid_text(message)
        self.code = code
        self.param = None if param is None else valid_text(param[:MAX_PARAM_CHARS])  # perhaps a name of the client's
        self.retry_after_s = retry_after_s
        self._headers = headers or {}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return dict(self._headers)
        return {**self._headers, "retry-after": str(max(1, math.ceil(self.retry_after_s)))}

    @property
    def envelope(self) -> dict[str, Any]:
        """The body of the answer, and the data of a frame in mid-stream."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def not_there(kind: str, thing_id: str) -> ApiError:
    """What never was, is not there any more, or is another tenant's: all of that looks alike."""
    return ApiError(404, f"there is no {kind} {shorten(thing_id)}, or not any more", code="not_found")


def key_reused() -> ApiError:
    """Clients would ask again by themselves, for they do so after a 409."""
    return ApiError(
        409,
        "this Idempotency-Key was used for another body; send a new key with a new body",
        code="idempotency_key_reused",
        param="Idempotency-Key",
        headers={"x-should-retry": "false"},
    )


def of_job(error: JobError) -> ApiError:
    """What the queue, or a job, says."""
    return of_code(error.code, str(error), retryable=error.retryable)


def of_code(code: str, message: str, *, retryable: bool = False) -> ApiError:
    """An error by the code that crosses processes (docs/reference/errors.md)."""
    shown = message_for_clients(code, message)
    if shown != message:
        log.warning("a client gets %s instead of: %s", code, message)
    status = meaning_of(code).http_status
    status = _STATUSES.get(status, status)
    retry = RETRY_AFTER_S if retryable and status in (429, 503, 507) else None
    return ApiError(status, shown, code=_CODES.get(code, code), retry_after_s=retry)


def of_worker(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return what a worker found wrong with a body, under the caller's names (see `callers_names`). Other errors stay
    as they are."""
    if error.code != "invalid_request":
        return error
    message, param = in_callers_words(error.message, names)
    code = _SCHEMA_CODES.get(param or "", error.code) if _IN_A_SCHEMA.search(message) else error.code
    return ApiError(error.status, message, code=code, param=param)


def wrong(error: InvalidJob, names: Mapping[str, str]) -> ApiError:
    """Return what is wrong with a body, under the caller's names."""
    message, param = in_callers_words(str(error), names)
    found = re.match(r"body\.(\w+) is missing|(\w+) is ", message)
    return ApiError(400, message, param=param or (found and (found[1] or found[2])) or None)
