"""How the consumer's two channels read their queues: which messages they ask for and when, and how they take them.

Kombu's channels ask for all queues alike, and take one message after another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery.worker.state import maybe_shutdown
from kombu.utils.json import loads
from redis.exceptions import RedisError, ResponseError

from cellama.tasks.connection.kombu_internals import (
    ask_with,
    deliver,
    make_clients_by,
    queues_in_turn,
    read_brpop,
    read_with,
    send_brpop,
    set_qos,
    socket_of,
    waits_for_message,
)
from cellama.tasks.connection.redis_errors import is_passing
from cellama.tasks.connection.redis_waits import redis_waits
from cellama.tasks.contract.names import SUBMITTED_AT_HEADER, TOKEN_HEADER, queue_key
from cellama.tasks.state.ledger import Ledger, new_run
from cellama.tasks.state.records import Fetched, PageLimits, Taken

from .holding import HoldingQoS, set_by_this_clock
from .places import Places

log = logging.getLogger(__name__)

MARKED = '"__type__"'  # in JSON that only kombu's own reader understands, which takes twice as long
NOT_A_MESSAGE = (KeyError, TypeError, ValueError)  # what reading something else raises
RETRY_S = 0.5  # until a message is taken again after Redis did not accept that


class QueueReader:
    """Reads the queues of one channel: messages of its priorities, for models that have capacity, which take turns.

    BRPOP takes from the first list that has a message. Kombu moves the queue of the last message to the end of its
    cycle, so models take turns. Within a model the more urgent list comes first.

    A message goes this way: Redis answers a BRPOP (`_read`), the worker takes the message in the ledger, and with the
    same script a page of others that wait (`_take`). Kombu delivers each of them (`_deliver`): it notes the message in
    `HoldingQoS`, and calls Celery's consumer.
    """

    def __init__(
        self,
        channel: Any,
        ledger: Ledger,
        lease_s: float,
        *,
        places: Callable[[], Places],
        priorities: Sequence[int],
        before: Sequence[QueueReader] = (),
    ) -> None:
        """The messages that the readers `before` this one hold count against its capacity too."""
        self.channel = channel
        self._ledger = ledger
        self._lease_s = lease_s
        self._places = places
        self._priorities = priorities
        self._counted = [*before, self]
        self.waits_for_redis = True  # except while the worker ends
        self._asked: frozenset[str] = frozenset()  # the queues of the BRPOP that waits
        self._client_id: tuple[Any, int] | None = None  # socket, its id in Redis
        self._may_unblock = True
        self._qos = HoldingQoS(channel, ledger, self.can_take)
        set_qos(channel, self._qos)
        ask_with(channel, self._ask)
        read_with(channel, self._read)

    def capacity(self, queues: Sequence[str]) -> dict[str, int]:
        """Return how many messages may be taken now from each of these queues."""
        return self._places().capacity(queues, *(reader._qos.held() for reader in self._counted))

    def can_take(self) -> bool:
        """Return whether kombu may read this channel: also while an answer is due, so that no message stays in it."""
        return waits_for_message(self.channel) or any(self.capacity(self.channel.active_queues).values())

    def keep_messages(self) -> None:
        """Return no messages when the channel is closed: its connection is lost, and the next channel has them."""
        self._qos.restore_at_shutdown = False

    # Asking

    def _open_queues(self) -> list[str]:
        return [queue for queue, capacity in self.capacity(queues_in_turn(self.channel)).items() if capacity]

    def _keys(self, queues: Sequence[str]) -> list[str]:
        """Return the lists of these queues, the first choice first."""
        groups = self._places().by_model(queues)
        return [queue_key(queue, priority) for group in groups for priority in self._priorities for queue in group]

    def _ask(self, timeout: float | None = None) -> None:
        """Do what kombu.transport.redis: Channel._brpop_start does, with our keys."""
        queues = self._open_queues()
        if not queues:
            return
        self._note_client_id(self.channel.client.connection)
        send_brpop(self.channel, self._keys(queues), timeout or self.channel.brpop_timeout or 0)
        self._asked = frozenset(queues)

    def _note_client_id(self, connection: Any) -> None:
        if self._may_unblock and (self._client_id is None or self._client_id[0] is not socket_of(connection)):
            connection.send_command("CLIENT", "ID")
            try:
                self._client_id = (socket_of(connection), int(connection.read_response()))
            except ResponseError as error:
                self._give_up_unblocking(error)

    def ask_again(self) -> None:
        """End a BRPOP that waits without a model which has capacity by now. Kombu then sends the next one."""
        channel = self.channel
        if not waits_for_message(channel) or self._client_id is None or self._asked.issuperset(self._open_queues()):
            return
        try:
            with channel.conn_or_acquire() as client:
                if client.client_unblock(self._client_id[1]):
                    self._asked = frozenset(self._open_queues())  # once is enough
        except ResponseError as error:
            self._give_up_unblocking(error)

    def _give_up_unblocking(self, error: ResponseError) -> None:
        log.warning("a model whose jobs have just ended may wait up to 1 s for the next one: %s", error)
        self._client_id, self._may_unblock = None, False

    # Reading

    def finish_reading(self) -> None:
        """Read the message of a BRPOP that waits, if there is one. Raises queue.Empty, RedisError."""
        self.waits_for_redis = False
        if waits_for_message(self.channel):
            self._read()

    def _read(self) -> None:
        """Deliver the message that an answer to a BRPOP brings, and those that are taken together with it.

        What is not a message is dropped, because it would otherwise end the worker, and the next one that reads it. If
        a message can't be delivered, its lease ends, and the reaper queues it again. Raises queue.Empty, RedisError.
        """
        key, payload = read_brpop(self.channel)
        queue = self._queue_of(key)
        page: list[Fetched] = []
        with _dropping_what_is_not_a_message():
            message = _decoded(payload)
            headers = message["headers"]
            headers.pop(TOKEN_HEADER, None)
            if headers.get("id") is not None and SUBMITTED_AT_HEADER in headers:  # else plain Celery's: plain_messages
                taken, page = self._take(str(headers["id"]), queue)
                _note_taken(headers, taken)
            deliver(self.channel, message, queue)
        for fetched in page:
            with _dropping_what_is_not_a_message():
                message = _decoded(fetched.payload)
                _note_taken(message["headers"], fetched.taken)
                deliver(self.channel, message, self._queue_of(fetched.key))

    def _queue_of(self, key: str) -> str:
        return key.rsplit(self.channel.sep, 1)[0]

    def _take(self, job_id: str, queue: str) -> tuple[Taken, list[Fetched]]:
        """Take a message that Redis has already removed from its list, and a page of others.

        It is retried while Redis is away or refuses the script, as a full Redis does, and the event loop waits. Raises
        RedisError if Redis refuses it for good, or the worker ends. The reaper then finds the message.
        """
        token = new_run()
        with redis_waits.of("the consumer") as waits:
            while True:
                try:
                    return self._ledger.take(job_id, self._lease_s, self._page_limits(queue), token)
                except RedisError as error:
                    if not (is_passing(error) and self.waits_for_redis):
                        raise
                    waits(error)
                maybe_shutdown()
                time.sleep(RETRY_S)

    def _page_limits(self, queue: str) -> PageLimits:
        """Return how many messages may come in one page with a message of this queue, and from which lists."""
        places = self._places()
        capacity = self.capacity(self.channel.active_queues)
        for other in capacity:
            capacity[other] -= places.model_of(other) == places.model_of(queue)  # the message itself is not held yet
        groups = places.by_model([queue for queue, left in capacity.items() if left > 0])
        return [(capacity[group[0]], self._keys(group)) for group in groups]


def _decoded(payload: bytes) -> dict[str, Any]:
    """Return a message as kombu knows it. Raises one of NOT_A_MESSAGE."""
    text = payload.decode()
    message = loads(text) if MARKED in text else json.loads(text)
    if not isinstance(message, dict) or not isinstance(message.setdefault("headers", {}), dict):
        raise TypeError("it is not an object with headers")
    return message


def _note_taken(headers: dict[str, Any], taken: Taken) -> None:
    headers[TOKEN_HEADER] = taken.token
    if taken.waited_s is not None and (headers.get("eta") or headers.get("expires")):
        set_by_this_clock(headers, taken.waited_s)


@contextlib.contextmanager
def _dropping_what_is_not_a_message() -> Iterator[None]:
    try:
        yield
    except NOT_A_MESSAGE:
        log.exception("something in a queue is not a message, and was dropped")


def keep_client(channel: Any) -> None:
    """Let a channel use one client for its commands. Kombu makes one for each, which takes longer than the command."""
    kept: dict[Any, Any] = {}  # pool → its client

    def once(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_once(asynchronous: bool = False) -> Any:
            if asynchronous:  # for the connections that the event loop listens on
                return create(asynchronous=True)
            pool = channel.pool
            if pool not in kept:
                kept.clear()
                kept[pool] = create()
            return kept[pool]

        return create_once

    make_clients_by(channel, once)
