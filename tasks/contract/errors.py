"""What can go wrong with a job, as its producer sees it.

JobError
├── InvalidJob          the call is wrong: nothing was queued
├── JobFailed           the job ran and failed; travels through Celery's result backend
├── JobCancelled        the job was cancelled
├── JobTimeout          nothing came within the time that the caller gave
├── ResultIgnored       the job was queued with `ignore_result`: there will be none
├── UnknownModel        no live worker serves the model
├── UnknownWorker       no live worker has that name
├── UnknownJob          there is no such job, or not any more
├── StreamTrimmed       events that the caller asked for are gone
├── RedisUnreachable    Redis does not answer, or refuses commands for a while
└── RedisRefused        Redis refuses a command for good
    └── RedisFull       because it is at its maxmemory
"""

from __future__ import annotations

from .codes import Exit, meaning_of
from .json_values import valid_text


class JobError(Exception):
    """A job could not be submitted, done or read; `str(error)` is written for people.

    What its `code` means is in one table (`contract.codes`).
    """

    code: str = "internal_error"

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later."""
        return meaning_of(self.code).retryable

    @property
    def http_status(self) -> int:
        """The status with which a web backend answers; 500 for a code that this version does not know."""
        return meaning_of(self.code).http_status

    @property
    def exit_code(self) -> Exit:
        """With which the command line ends."""
        return meaning_of(self.code).exit_code

    def __str__(self) -> str:
        return valid_text(super().__str__())  # it may quote what a producer sent


class InvalidJob(JobError, ValueError):
    """The call is wrong, and nothing was queued; the message lists each problem with its value and a remedy."""

    code = "invalid_request"


class JobFailed(JobError):
    """The job ended with an error. `code` and `message` are those of its `error` event, which may know better than
    this version's table whether the job is `retryable`."""

    def __init__(self, code: str, message: str, retryable: bool | None = None) -> None:
        message = valid_text(message)
        self._retryable = meaning_of(code).retryable if retryable is None else retryable
        super().__init__(code, message, self._retryable)  # args survive JSON: Celery makes the error again from them
        self.code = code
        self.message = message

    @property
    def retryable(self) -> bool:
        """As its `error` event says; without a word there, as the table of codes does."""
        return self._retryable

    def __str__(self) -> str:
        return self.message


class JobCancelled(JobError):
    """The job was cancelled, so it has no result; what it generated until then is in its stream."""

    code = "cancelled"


class JobTimeout(JobError, TimeoutError):
    """Nothing came within the seconds that the caller gave. The job goes on."""

    code = "timeout"


class ResultIgnored(JobError):
    """The job was queued with `ignore_result`: there will be no result, only its stream."""

    code = "result_ignored"


class UnknownModel(JobError):
    """No live worker serves the model."""

    code = "unknown_model"


class UnknownWorker(JobError):
    """No live worker has that name."""

    code = "unknown_worker"


class UnknownJob(JobError):
    """There is no such job, or not any more."""

    code = "unknown_job"


class StreamTrimmed(JobError):
    """Events that the caller asked for are gone from the journal, or others stand in their place after a failover."""

    code = "stream_trimmed"


class RedisUnreachable(JobError):
    """Redis does not answer, or accepts no commands for a while because it is loading, busy, read-only or short of
    replicas. The same call may succeed later.

    `job_id` is the id of the job that a call of a task would have queued. If Redis stopped answering in the middle of
    the call, the job may be queued all the same. `task.apply_async(…, task_id=error.job_id)` then queues it once, and
    so does a call with the same idempotency key as the first one.
    """

    code = "redis_unreachable"
    job_id: str | None = None


class RedisRefused(JobError):
    """Redis refuses a command for good, because of a missing right, a wrong password or a key of another type."""

    code = "redis_refused"


class RedisFull(RedisRefused):
    """Redis is at its maxmemory, and takes nothing more."""

    code = "redis_full"
