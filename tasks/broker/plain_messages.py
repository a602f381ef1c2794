"""Messages of producers with plain Celery, without cellama.

The first worker that takes such a message notes its job in the ledger, and queues it again as a message of ours. Kombu
gives priority 0, the most urgent, to a message without a priority. So 0 stands for the default here. A producer that
wants the most urgent priority sets it in the payload.
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

RETRY_S = 1.0  # while Redis is away
HIDDEN = "(…)"  # what Flower shows of prompts


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return Celery's strategy, which starts the job of a message, and adopts messages of plain producers before."""
    handle: Callable[..., Any] = default(task, app, consumer, **options)

    def take(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **others: Any) -> Any:
        runtime = getattr(consumer.app, "runtime", None)  # None: a worker of another app
        if runtime is None or SUBMITTED_AT_HEADER in message.headers:
            return handle(message, body, ack, reject, callbacks, **others)
        try:
            adopt(runtime.ledger, task, message)
        except RedisError as error:
            log.warning("can't note a job of plain Celery: %s; it is retried", error)
            again = (message, body, ack, reject, callbacks)
            return consumer.timer.call_after(RETRY_S, take, again, others)
        return ack(log, consumer.connection_errors)

    return take


def adopt(ledger: Ledger, task: Any, message: Any) -> None:
    """Queue a message again as one of ours, with a ledger entry and the priority that it means.

    A message whose job is in the ledger is a copy of one that was adopted before, and is dropped.
    """
    args, kwargs, _ = message.payload
    given = message.properties.get("priority")
    call: TaskCall = task.call_of_plain(args, kwargs, {**message.delivery_info, "priority": given})
    adopted = Message(queue_key(call.queue, call.priority), _adopted(message, call.priority, ledger.now()))
    ledger.submit([Submission(message.headers["id"], call, adopted)])


def _adopted(message: Any, priority: int, now: float) -> str:
    """Return the message with another priority, and another delivery tag, because this one is not acked yet.

    Its producer's clock is unknown, so its `eta` and `expires` are taken as times of Redis' clock, like `now`.
    """
    made = message.serializable()
    made["properties"] = {**made["properties"], "priority": priority, "delivery_tag": uuid()}
    made["headers"][SUBMITTED_AT_HEADER] = now
    if not get_settings().show_prompts:
        made["headers"] |= {"argsrepr": HIDDEN, "kwargsrepr": HIDDEN}
    return json.dumps(made)
