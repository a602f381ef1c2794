"""The table of all error codes, with their meaning, HTTP status and exit code, and whether a retry may help.

Codes are passed between processes in `error` events, in results, and in the files of bulk runs. Job errors
(`contract.errors`) look up the meaning of their code here. Engine errors have only a code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """The exit codes of all commands."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    TIMEOUT = 4
    CONFIG = 78  # only for worker processes (EX_CONFIG in sysexits.h); supervisors must not restart them
    INTERRUPTED = 130


EXITS = {  # the exit codes of commands, for their help
    Exit.OK: "ok",
    Exit.FAILED: "failed",
    Exit.USAGE: "wrong usage",
    Exit.UNREACHABLE: "Redis or worker not reachable",
    Exit.TIMEOUT: "timeout",
    Exit.INTERRUPTED: "Ctrl-C",
}


@dataclass(frozen=True, slots=True)
class Code:
    """A reason why a job or a call can fail."""

    code: str
    meaning: str
    http_status: int
    exit_code: Exit = Exit.FAILED
    retryable: bool = False


CODES: dict[str, Code] = {
    row.code: row
    for row in (
        Code(
            "invalid_request", "a parameter or a text is invalid; the message names it and the remedy", 400, Exit.USAGE
        ),
        Code("prompt_too_long", "the prompt is too long for a slot", 400, Exit.USAGE),
        Code(
            "template_failed", "the model has no chat template, or its template rejected the messages", 400, Exit.USAGE
        ),
        Code("wrong_capability", "the model is not loaded for this task", 400, Exit.USAGE),
        Code(
            "grammar_failed",
            "the combination of grammar, biases and `ignore_eos` does not allow any token",
            400,
            Exit.USAGE,
        ),
        Code("unknown_model", "no live worker serves the model or reads the queue", 404, Exit.UNREACHABLE),
        Code("unknown_adapter", "the model has no adapter with that name", 404, Exit.USAGE),
        Code(
            "unknown_key", "the context of the `parent_key` has expired, or belongs to another scope", 404, Exit.USAGE
        ),
        Code("unknown_job", "the job does not exist, or its data has expired", 404),
        Code("unknown_worker", "no live worker has that name", 404, Exit.UNREACHABLE),
        Code("adapter_busy", "the adapter is in use and can't be unloaded now", 409, retryable=True),
        Code("model_busy", "the model is in use and can't be unloaded now", 409, retryable=True),
        Code("model_changed", "no worker has the model and adapters that the job started with", 409, retryable=True),
        Code(
            "grammar_changed",
            "no worker has the llguidance version that the job's constrained generation started with",
            409,
            retryable=True,
        ),
        Code("id_taken", "another model already has this id", 409),
        Code("result_ignored", "the job was queued with `ignore_result`, so it has no result", 409),
        Code("stream_trimmed", "the requested events have expired", 410),
        Code("queue_full", "the engine's waiting queue is at its limit", 429, retryable=True),
        Code("limit_reached", "the tenant or the model has as many jobs as its limit allows", 429, retryable=True),
        Code("cancelled", "the job was cancelled", 499),
        Code("dead", "several workers crashed while running the job; `cellama dead requeue` queues it again", 500),
        Code("decode_failed", "llama.cpp rejected the tokens of this request", 500, retryable=True),
        Code("refused", "Celery refused the message before the job started", 500),
        Code("model_load_failed", "the model's source is missing, damaged or not supported", 500),
        Code("adapter_load_failed", "the adapter's file is missing, damaged, or made for another model", 500),
        Code("manager_exists", "the process already has a model manager", 500),
        Code("no_worker", "a task was called in a process that is not a worker; queue the task instead", 500),
        Code("internal_error", "an unexpected error occurred; the worker's log contains the traceback", 500),
        Code(
            "redis_refused",
            "Redis refuses a command permanently: a permission is missing, or a key has another type",
            500,
            Exit.UNREACHABLE,
        ),
        Code("engine_stopped", "the engine was closed, or its thread died", 503, retryable=True),
        Code(
            "redis_unreachable",
            "Redis does not answer, or temporarily refuses commands",
            503,
            Exit.UNREACHABLE,
            retryable=True,
        ),
        Code(
            "timeout",
            "the caller's or the job's timeout has passed",
            504,
            Exit.TIMEOUT,
            retryable=True,
        ),
        Code("insufficient_memory", "the model does not fit into the memory budget", 507),
        Code("redis_full", "Redis has reached its maxmemory", 507, Exit.UNREACHABLE, retryable=True),
    )
}


def meaning_of(code: str) -> Code:
    """Return the table row for a code. An unknown code, for example from a newer worker, has HTTP status 500."""
    return CODES.get(code) or Code(code, "unknown error code", 500)


_REDIS_CODES = ("redis_unreachable", "redis_refused", "redis_full")


def message_for_clients(code: str, message: str) -> str:
    """Return the error message to send to clients of a service.

    Redis error messages contain the Redis host, port and user, so clients receive the code's meaning instead.
    """
    return meaning_of(code).meaning if code in _REDIS_CODES else message
