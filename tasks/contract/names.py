"""Names of tasks and queues, and the priorities of jobs. In Redis, priority 0 is most urgent, and 9 is least urgent."""

from __future__ import annotations

import json
from uuid import UUID, uuid5

from cellama.config import DEFAULT_KEY_PREFIX, DEFAULT_MODEL as DEFAULT_MODEL, get_settings

PRIORITY_INTERACTIVE = 3
PRIORITY_BULK = 9
PRIORITIES = range(10)
URGENT_PRIORITIES = PRIORITIES[:6]
PROTECTED_PRIORITIES = PRIORITIES[:3]  # the engine treats the same priorities as protected
BULK_PRIORITIES = PRIORITIES[6:]  # the engine treats the same priorities as bulk
CLASSES = {"interactive": URGENT_PRIORITIES, "bulk": BULK_PRIORITIES}  # classes of jobs, the most urgent first
PRIORITY_SEPARATOR = "\x06\x16"  # kombu's default, see docs/adr/001-priority-separator.md

SCOPE_SEPARATOR = "\x1f"  # in a `cache_scope` from the gateway, between the tenant and the salt of the request
WEIGHT_HEADER = "cellama_weight"  # number of jobs whose work a message contains; 1 if absent
TOKEN_HEADER = "cellama_token"  # set by the worker that holds the message (tasks/broker/message.py)
SUBMITTED_AT_HEADER = "cellama_submitted_at"  # Unix seconds by the producer's clock; absent for plain Celery
# Namespace of the job ids that are made from idempotency keys.
_KEY_NAMESPACE = UUID("6d1f5a0e-3a0c-4b57-9d5a-5f0a1c7e2b44")


def key_prefix() -> str:
    """Return the prefix of this installation's Redis keys and queue names (keys.py), without the colon."""
    return get_settings().key_prefix


def model_named(name: str) -> str:
    """Resolve an alias (`model_aliases`) into the name of its model. Other names are returned unchanged."""
    return get_settings().model_aliases.get(name, name)


def queue_name(model: str) -> str:
    """Return the name of a model's Celery queue.

    The queue name's prefix is unique among Redis keys, regardless of the model id (keys.py).
    """
    return f"{key_prefix()}:queue:{model_named(model)}"


def queues_of_model(model_id: str) -> list[str]:
    """Return the Celery queues of a model: its own queue, and the queues of its aliases, which plain Celery may use."""
    prefix = queue_name("")
    aliases = [alias for alias, model in get_settings().model_aliases.items() if model == model_id]
    return [f"{prefix}{name}" for name in (model_id, *aliases)]


def is_model_queue(queue: str) -> bool:
    """Return whether a Celery queue belongs to a model."""
    return queue.startswith(queue_name(""))


def model_of(queue: str) -> str:
    """Return the model of a Celery queue, or the queue itself if it belongs to another app."""
    return queue.removeprefix(queue_name(""))


def queue_keys(model_id: str) -> list[str]:
    """Return the Redis lists of a model's queue, most urgent first. Kombu uses one list per priority."""
    return [queue_key(queue_name(model_id), priority) for priority in PRIORITIES]


def queue_key(queue: str, priority: int) -> str:
    """Return the Redis list that contains a Celery queue's messages with this priority."""
    return queue if priority == 0 else f"{queue}{PRIORITY_SEPARATOR}{priority}"


def class_of_priority(priority: int) -> str:
    """Return the class of a priority, which is a key of CLASSES."""
    return "interactive" if priority in URGENT_PRIORITIES else "bulk"


def failure_key(model_id: str, adapter: str | None = None) -> str:
    """Return the key under which a worker records a failure of a model or one of its adapters."""
    return model_id if adapter is None else f"adapter {adapter!r} of {model_id!r}"


def evicting_key(model_id: str) -> str:
    """Return the key under which a worker records that a model's cache could not be emptied."""
    return f"cache of {model_id!r}"


def job_id_of_key(task: str, scope: str, key: str) -> str:
    """Return the job id for an idempotency key. The same key yields a different id for each task and scope.

    The id also depends on the key prefix, because Celery's result keys don't contain this prefix.
    """
    prefix = key_prefix()
    named = [task, scope, key] if prefix == DEFAULT_KEY_PREFIX else [task, scope, key, prefix]
    return str(uuid5(_KEY_NAMESPACE, json.dumps(named)))
