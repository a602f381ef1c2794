"""Messages of plain Celery, whose producers know nothing of cellama.

The first worker that gets one notes its job in the ledger, and queues it again as a message of ours. Kombu says
priority 0, the most urgent, for a message without one. So 0 stands for the default here; who wants to be the most
urgent says so in the payload.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from celery import uuid
from celery.worker.strategy import default
from redis.exceptions import RedisError

from cellama.config import get_settings
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, queue_key
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Message, Submission, TaskCall

log = logging.getLogger(__name__)

RETRY_S = 1.0
HIDDEN = "(…)"  # what Flower shows of prompts


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's way from a message to a running job, with a look at those of plain producers before."""
    handle: Callable[..., Any] = default(task, app, consumer, **options)

    def take(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **others: Any) -> Any:
        runtime = getattr(consumer.app, "runtime", None)  # None: a worker of another app
        if runtime is None or SUBMITTED_AT_HEADER in message.headers:
            return handle(message, body, ack, reject, callbacks, **others)
        try:
            adopt(runtime.ledger, task, message)
        except RedisError as error:
            log.warning("a job of plain Celery waits for Redis: %s", error)
            again = (message, body, ack, reject, callbacks)
            return consumer.timer.call_after(RETRY_S, take, again, others)
        return ack(log, consumer.connection_errors)

    return take


def adopt(ledger: Ledger, task: Any, message: Any) -> None:
    """Queues the message again, as one of a job that the ledger knows, under the priority that it means.

    One that stands in the ledger is a copy of one that was adopted before, and goes.
    """
    args, kwargs, _ = message.payload
    given = message.properties.get("priority")
    call: TaskCall = task.call_of_plain(args, kwargs, {**message.delivery_info, "priority": given})
    adopted = Message(queue_key(call.queue, call.priority), _adopted(message, call.priority, ledger.now()))
    ledger.submit([Submission(message.headers["id"], call, adopted)])


def _adopted(message: Any, priority: int, now: float) -> str:
    """The same message under another priority, and another tag, as this one is not acked yet.

    Its producer's clock is unknown: its `eta` and `expires` are taken for times of `now`'s clock, that of Redis.
    """
    made = message.serializable()
    made["properties"] = {**made["properties"], "priority": priority, "delivery_tag": uuid()}
    made["headers"][SUBMITTED_AT_HEADER] = now
    if not get_settings().show_prompts:
        made["headers"] |= {"argsrepr": HIDDEN, "kwargsrepr": HIDDEN}
    return json.dumps(made)
