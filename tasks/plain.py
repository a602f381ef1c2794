"""Messages of plain Celery, whose producers know nothing of cellama: taken into the ledger when a worker takes them.

Kombu says priority 0, the most urgent, for a message without one. So 0 stands for the default here, and the message
goes to where it belongs; who wants to be the most urgent says so in the payload.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from celery import uuid
from celery.worker.strategy import default
from redis.exceptions import RedisError

from cellama.config import get_settings

from .contract.names import SUBMITTED_AT_HEADER, queue_key
from .ledger import Ledger
from .options import delay_s
from .records import Call, Message, Submission
from .request import HIDDEN

log = logging.getLogger(__name__)


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's way from a message to a running job, with a look at those of plain producers before."""
    handle: Callable[..., Any] = default(task, app, consumer, **options)

    def take(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **others: Any) -> Any:
        runtime = getattr(consumer.app, "runtime", None)  # None: a worker of another app
        if runtime is not None and body is None and SUBMITTED_AT_HEADER not in message.headers:
            try:
                moved = adopt(runtime.ledger, task, message)
            except RedisError as error:  # it is noted when it begins
                log.warning("a job of plain Celery is not noted yet: %s", error)
            else:
                if moved:
                    return ack(log, consumer.connection_errors)
        return handle(message, body, ack, reject, callbacks, **others)

    return take


def adopt(ledger: Ledger, task: Any, message: Any) -> bool:
    """Notes the job. True if its message is not this one any more, but one in the list of its priority."""
    job_id, (args, kwargs, _) = message.headers["id"], message.payload
    given = message.properties.get("priority")
    call: Call = task.call_of_plain(args, kwargs, {**message.delivery_info, "priority": given})
    if call.priority == (given or 0):
        ledger.submit(job_id, call)
        return False
    moved = Message(queue_key(call.queue, call.priority), _moved(task, message, call.priority))
    ledger.submit_all([Submission(job_id, call, message=moved)])  # a copy of one that was moved before goes
    return True


def _moved(task: Any, message: Any, priority: int) -> str:
    """The same message under another priority, and another tag, as this one is not acked yet."""
    made = message.serializable()
    made["properties"] = {**made["properties"], "priority": priority, "delivery_tag": uuid()}
    made["headers"][SUBMITTED_AT_HEADER] = time.time() + delay_s(task.app, {"eta": made["headers"].get("eta")})
    if not get_settings().show_prompts:
        made["headers"] |= {"argsrepr": HIDDEN, "kwargsrepr": HIDDEN}
    return json.dumps(made)
