"""Names of tasks and queues, and priorities. On Redis, priority 0 is the most urgent and 9 the least."""

from __future__ import annotations

import json
from uuid import UUID, uuid5

from cellama.config import DEFAULT_KEY_PREFIX, get_settings

DEFAULT_MODEL = ":default"
PRIORITY_INTERACTIVE = 3
PRIORITY_BULK = 9
PRIORITIES = range(10)
URGENT_PRIORITIES = PRIORITIES[:6]
BULK_PRIORITIES = PRIORITIES[6:]  # as the engine has it: it saves nothing of these for others
CLASSES = {"interactive": URGENT_PRIORITIES, "bulk": BULK_PRIORITIES}  # of jobs, the most urgent first
PRIORITY_SEPARATOR = "\x06\x16"  # kombu's default, see docs/adr/001-priority-separator.md

WEIGHT_HEADER = "cellama_weight"  # so many jobs' worth of work is in a message; absent: one
TOKEN_HEADER = "cellama_token"  # set by a worker: that it holds the message (tasks/broker/holding.py)
SUBMITTED_AT_HEADER = "cellama_submitted_at"  # unix seconds, by the producer's clock; absent when that is plain Celery
_OF_KEYS = UUID("6d1f5a0e-3a0c-4b57-9d5a-5f0a1c7e2b44")  # the namespace of job ids that are made from keys


def key_prefix() -> str:
    """Return the first part of every Redis key and queue name of this installation (keys.py), without the colon."""
    return get_settings().key_prefix


def queue_name(model_id: str) -> str:
    """Return the Celery queue of a model. No other key begins like that, whatever models are called (keys.py)."""
    return f"{key_prefix()}:queue:{model_id}"


def is_model_queue(queue: str) -> bool:
    """Return whether a Celery queue is that of a model."""
    return queue.startswith(queue_name(""))


def model_of(queue: str) -> str:
    """Return the model of a Celery queue; the queue itself if it belongs to another app."""
    return queue.removeprefix(queue_name(""))


def queue_keys(model_id: str) -> list[str]:
    """The Redis lists behind a model's queue, most urgent first (kombu: one list per priority)."""
    return [queue_key(queue_name(model_id), priority) for priority in PRIORITIES]


def queue_key(queue: str, priority: int) -> str:
    """The Redis list with the messages of one priority of a Celery queue."""
    return queue if priority == 0 else f"{queue}{PRIORITY_SEPARATOR}{priority}"


def class_of_priority(priority: int) -> str:
    """One of CLASSES."""
    return "interactive" if priority in URGENT_PRIORITIES else "bulk"


def failure_key(model_id: str, adapter: str | None = None) -> str:
    """What a worker's failures call a model, or an adapter of it."""
    return model_id if adapter is None else f"adapter {adapter!r} of {model_id!r}"


def evicting_key(model_id: str) -> str:
    """What a worker's failures call the emptying of a model's cache."""
    return f"cache of {model_id!r}"


def job_id_of_key(task: str, scope: str, key: str) -> str:
    """Return the id of the job that an idempotency key stands for: one for each task and scope.

    Celery's result keys have no prefix of ours, so installations with different prefixes have different ids.
    """
    prefix = key_prefix()
    named = [task, scope, key] if prefix == DEFAULT_KEY_PREFIX else [task, scope, key, prefix]
    return str(uuid5(_OF_KEYS, json.dumps(named)))
