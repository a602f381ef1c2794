"""The errors that callers receive. All of these errors are subclasses of `JobError`.

`InvalidJob`: The call is not valid, and nothing was queued.
`LimitReached`: The tenant or the model has as many jobs as its limit allows, and nothing was queued.
`JobFailed`: The job failed.
`JobCancelled`: The job was cancelled.
`JobTimeout`: The caller's timeout has passed.
`ResultIgnored`: The job was queued with `ignore_result`.
`UnknownModel`: No live worker serves the model.
`UnknownWorker`: No live worker has this name.
`UnknownJob`: The job does not exist, or its data has expired.
`StreamTrimmed`: Requested events have expired.
`RedisUnreachable`: Redis does not answer, or temporarily refuses commands.
`RedisRefused`: Redis refuses a command permanently.
`RedisFull`, a subclass of `RedisRefused`: Redis has reached its maxmemory.
"""

from __future__ import annotations

from .codes import Exit, meaning_of
from .json_values import valid_text


class JobError(Exception):
    """The base class of all cellama errors. `str(error)` is a human-readable message.

    The table in `contract.codes` explains each `code`.
    """

    code: str = "internal_error"

    @property
    def retryable(self) -> bool:
        """Return whether the same call may succeed later."""
        return meaning_of(self.code).retryable

    @property
    def http_status(self) -> int:
        """Return the HTTP status for a web backend, which is 500 for an unknown code."""
        return meaning_of(self.code).http_status

    @property
    def exit_code(self) -> Exit:
        """Return the exit code for the command line."""
        return meaning_of(self.code).exit_code

    def __str__(self) -> str:
        return valid_text(super().__str__())  # the message may quote input of a producer


class InvalidJob(JobError, ValueError):
    """The call is not valid, and nothing was queued. The message lists each problem with its value and a remedy."""

    code = "invalid_request"


class LimitReached(JobError):
    """The tenant or the model has as many jobs as its limit allows (`over_limit`). The call may succeed later."""

    code = "limit_reached"


class JobFailed(JobError):
    """The job ended with an error. `code`, `message` and `retryable` come from its `error` event."""

    def __init__(self, code: str, message: str, retryable: bool | None = None) -> None:
        message = valid_text(message)
        self._retryable = meaning_of(code).retryable if retryable is None else retryable
        super().__init__(code, message, self._retryable)  # Celery restores the error from these arguments
        self.code = code
        self.message = message

    @property
    def retryable(self) -> bool:
        """Return whether the same call may succeed later, according to the `error` event or the table of codes."""
        return self._retryable

    def __str__(self) -> str:
        return self.message


class JobCancelled(JobError):
    """The job was cancelled, so it has no result. Its stream contains the output up to that point."""

    code = "cancelled"


class JobTimeout(JobError, TimeoutError):
    """The caller's timeout has passed. The job continues."""

    code = "timeout"


class ResultIgnored(JobError):
    """The job was queued with `ignore_result`, so it has a stream but no result."""

    code = "result_ignored"


class UnknownModel(JobError):
    """No live worker serves the model."""

    code = "unknown_model"


class UnknownWorker(JobError):
    """No live worker has this name."""

    code = "unknown_worker"


class UnknownJob(JobError):
    """The job does not exist, or its data has expired."""

    code = "unknown_job"


class StreamTrimmed(JobError):
    """The requested events have expired, or different events have replaced them after a Redis failover."""

    code = "stream_trimmed"


class RedisUnreachable(JobError):
    """Redis does not answer, or temporarily refuses commands, for example because it is loading or read-only.

    The same call may succeed later. `job_id` is the id of the job that the call should have queued. If Redis stopped
    answering during the call, the job may have been queued. To queue the job exactly once, call
    `task.apply_async(…, task_id=error.job_id)`, or repeat the call with the same idempotency key.
    """

    code = "redis_unreachable"
    job_id: str | None = None


class RedisRefused(JobError):
    """Redis refuses a command permanently.

    For example, a permission is missing, the password is wrong, or a key has another type.
    """

    code = "redis_refused"


class RedisFull(RedisRefused):
    """Redis has reached its maxmemory."""

    code = "redis_full"
