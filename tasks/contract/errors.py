"""What can go wrong with a job, as its producer sees it.

JobError
├── InvalidJob          the call is wrong: nothing was queued
├── JobFailed           the job ran and failed; travels through Celery's result backend
├── JobCancelled        somebody cancelled the job
├── JobTimeout          nothing came within the time that the caller gave
├── ResultIgnored       the job was queued with `ignore_result`: there will be none
├── UnknownModel        no live worker serves the model
├── UnknownWorker       no live worker has that name
├── UnknownJob          there is no such job, or not any more
├── StreamTrimmed       events that the caller asked for are gone
├── RedisUnreachable    Redis does not answer
└── RedisRefused        Redis answers, and says no
    └── RedisFull       because it is at its maxmemory
"""

from __future__ import annotations

from .valid_text import valid_text


class JobError(Exception):
    """A job could not be submitted, done or read; `str(error)` is written for people."""

    code: str = "job_error"
    retryable: bool = False

    def __str__(self) -> str:
        return valid_text(super().__str__())  # it may quote what somebody sent


class InvalidJob(JobError, ValueError):
    code = "invalid_request"


class JobFailed(JobError):
    """The job ended with an error. `code` and `retryable` are those of its `error` event."""

    def __init__(self, code: str, message: str, retryable: bool = False) -> None:
        message = valid_text(message)
        super().__init__(code, message, retryable)  # args survive JSON: Celery makes the error again from them
        self.code = code
        self.message = message
        self.retryable = retryable

    def __str__(self) -> str:
        return self.message


class JobCancelled(JobError):
    code = "cancelled"


class JobTimeout(JobError, TimeoutError):
    code = "timeout"
    retryable = True


class ResultIgnored(JobError):
    code = "result_ignored"


class UnknownModel(JobError):
    code = "unknown_model"


class UnknownWorker(JobError):
    code = "unknown_worker"


class UnknownJob(JobError):
    code = "unknown_job"


class StreamTrimmed(JobError):
    code = "stream_trimmed"


class RedisUnreachable(JobError):
    code = "redis_unreachable"
    retryable = True


class RedisRefused(JobError):
    code = "redis_refused"


class RedisFull(RedisRefused):
    code = "redis_full"
    retryable = True
