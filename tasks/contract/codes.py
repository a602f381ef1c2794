"""The one table of error codes: what a code means, whether trying again may help, and its HTTP status.

Codes are what crosses processes: in `error` events, in results, in the files of bulk runs. Classes (`contract.errors`,
`engine.errors`) carry the same values, and a test compares them with this table.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import JobError


@dataclass(frozen=True, slots=True)
class Code:
    """One way in which a job, or a call, can fail."""

    code: str
    meaning: str
    http_status: int
    retryable: bool = False


CODES: dict[str, Code] = {
    row.code: row
    for row in (
        Code("invalid_request", "a parameter or a text is wrong; the message names it with a remedy", 400),
        Code("prompt_too_long", "the prompt can never fit into a slot", 400),
        Code("template_failed", "the model's chat template refused the messages, or there is none", 400),
        Code("wrong_capability", "the model is not loaded for this task", 400),
        Code("grammar_failed", "grammar, biases and `ignore_eos` together allow no token", 400),
        Code("unknown_model", "no live worker serves the model", 404),
        Code("unknown_adapter", "the model has no adapter of that name", 404),
        Code("unknown_job", "there is no such job, or it is forgotten by now", 404),
        Code("unknown_worker", "no live worker has that name", 404),
        Code("adapter_busy", "the adapter is in use and can't be unloaded now", 409, retryable=True),
        Code("model_busy", "the model is in use and can't be unloaded now", 409, retryable=True),
        Code("model_changed", "no worker has the model and adapters that the job began with", 409, retryable=True),
        Code("id_taken", "another model has the id", 409),
        Code("result_ignored", "the job was queued with `ignore_result`, so that there is no result", 409),
        Code("result_lost", "the job has ended, and its result is not kept any more", 410),
        Code("stream_trimmed", "the events that were asked for are gone", 410),
        Code("queue_full", "the engine's waiting queue is at its limit", 429, retryable=True),
        Code("cancelled", "the job was cancelled", 499),
        Code("dead", "each of several workers ended while it ran the job; `cellama dead requeue` queues it again", 500),
        Code("decode_failed", "llama.cpp refused the tokens of this request", 500, retryable=True),
        Code("refused", "Celery refused the message before anything of it ran", 500),
        Code("model_load_failed", "the model's source is missing, damaged or not supported", 500),
        Code("adapter_load_failed", "the adapter's file is missing, damaged, or made for another model", 500),
        Code("manager_exists", "the process has a model manager already", 500),
        Code("no_worker", "a task was called in a process that is no worker; queue it", 500),
        Code("internal_error", "an error that no one foresaw; the worker's log has its trace", 500),
        Code("redis_refused", "Redis answers, and says no: a right is missing, or a key has another type", 500),
        Code("engine_stopped", "the engine closed, or its thread died", 503, retryable=True),
        Code("redis_unreachable", "Redis does not answer", 503, retryable=True),
        Code("timeout", "nothing came within the time that the caller, or the job, had", 504, retryable=True),
        Code("insufficient_memory", "the model does not fit into the memory budget", 507),
        Code("redis_full", "Redis is at its maxmemory", 507, retryable=True),
    )
}


def http_status_of(error: JobError) -> int:
    """The HTTP status with which a web backend answers an error of a job; 500 for a code that is not in the table."""
    known = CODES.get(error.code)
    return known.http_status if known else 500
