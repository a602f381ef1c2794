"""What the consumer's two channels do otherwise than kombu's: which messages they ask Redis for, and when."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery.worker import state
from kombu.utils.json import loads
from redis.exceptions import ResponseError

from cellama.tasks.connection.kombu_internals import (
    ask_with,
    deliver,
    make_clients_by,
    queues_in_turn,
    read_message,
    read_with,
    send_brpop,
    socket_of,
    waits_for_message,
)
from cellama.tasks.contract.names import WEIGHT_HEADER, queue_key
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.records import Fetched, Room

from .holding import HoldingQoS
from .places import HeldJobs, Places

log = logging.getLogger(__name__)

MARKED = '"__type__"'  # in the JSON of what kombu takes for more than JSON; its own reader takes twice as long
NO_MESSAGE = (KeyError, TypeError, ValueError)  # what reading something raises that is no message of Celery's

RoomOf = Callable[[Sequence[str]], Mapping[str, int]]


class PlaceQoS(HoldingQoS):
    """Lets a channel take messages as long as a model has room for one."""

    def __init__(self, channel: Any, ledger: Ledger, lease_s: float, room_of: RoomOf) -> None:
        """`room_of` tells how many messages may be taken now from each of these queues."""
        super().__init__(channel, ledger, lease_s)
        self.room_of = room_of
        self._held: tuple[Any, HeldJobs] = (None, {})

    def open_queues(self, queues: Sequence[str]) -> list[str]:
        """The queues from which a message may be taken now."""
        return [queue for queue, room in self.room_of(queues).items() if room]

    def can_consume(self) -> bool:
        """Also while an answer of Redis is due: what it has taken from a queue must not lie in a socket."""
        return bool(waits_for_message(self.channel) or self.open_queues(self.channel.active_queues))

    def held(self) -> HeldJobs:
        """What this channel holds, but for jobs whose ETA has not come: they take no other job's place.

        The event loop asks at each of its turns, several times; it is counted anew when something has changed.
        """
        changes = (self.num_changes, len(state.scheduled_requests))
        if self._held[0] != changes:
            self._held = changes, self._count_held()
        return self._held[1]

    def _count_held(self) -> HeldJobs:
        early = {request.message.delivery_tag for request in list(state.scheduled_requests)}
        held: dict[str, list[int]] = {}
        for message in self.messages():
            if message.delivery_tag not in early:
                held.setdefault(message.delivery_info["routing_key"], []).append(_weight_of(message))
        return held


def _weight_of(message: Any) -> int:
    weight = message.headers.get(WEIGHT_HEADER, 1)
    return weight if isinstance(weight, int) and weight > 0 else 1  # any Celery may have sent it


class Asker:
    """Asks Redis for the next message of a channel: of these priorities, and of models that have room, in turns.

    BRPOP takes from the first list that has something. Kombu moves the queue of the last message to the end of its
    cycle, so models take turns; within a model the more urgent list comes first.
    """

    def __init__(self, channel: Any, places: Callable[[], Places], priorities: Sequence[int]) -> None:
        self._channel = channel
        self._places = places
        self._priorities = priorities
        self._asked: frozenset[str] = frozenset()  # the queues that the BRPOP which waits was sent for
        self._client_id: tuple[Any, int] | None = None  # socket, its id in Redis
        self._may_unblock = True
        ask_with(channel, self._start)
        read_with(channel, self._read)
        channel.qos.room_beside = self._room_beside

    def _open_queues(self) -> list[str]:
        channel = self._channel
        return list(channel.qos.open_queues(queues_in_turn(channel)))

    def _keys(self, queues: Sequence[str]) -> list[str]:
        """The lists of these queues, the first choice first."""
        groups = self._places().by_model(queues)
        return [queue_key(queue, priority) for group in groups for priority in self._priorities for queue in group]

    def _start(self, timeout: float | None = None) -> None:
        """What kombu.transport.redis: Channel._brpop_start does, with our keys."""
        channel = self._channel
        queues = self._open_queues()
        if not queues:
            return
        self._note_client_id(channel.client.connection)
        send_brpop(channel, self._keys(queues), timeout or channel.brpop_timeout or 0)
        self._asked = frozenset(queues)

    def _read(self) -> None:
        """Delivers the message that an answer to a BRPOP brings, and what the ledger took together with that."""
        channel = self._channel
        try:
            _contained(read_message, channel)
        finally:
            for fetched in channel.qos.take_page():
                _contained(self._deliver, fetched)

    def _deliver(self, fetched: Fetched) -> None:
        text = fetched.payload.decode()
        message = loads(text) if MARKED in text else json.loads(text)
        deliver(self._channel, message, fetched.key.rsplit(self._channel.sep, 1)[0])

    def _room_beside(self, queue: str) -> Room:
        """What may come in one page with a message of this queue, which is not among what is held yet."""
        channel, places = self._channel, self._places()
        room = dict(channel.qos.room_of(channel.active_queues))
        for other in room:
            room[other] -= places.model_of(other) == places.model_of(queue)
        groups = places.by_model([queue for queue, left in room.items() if left > 0])
        return [(room[group[0]], self._keys(group)) for group in groups]

    def _note_client_id(self, connection: Any) -> None:
        if self._may_unblock and (self._client_id is None or self._client_id[0] is not socket_of(connection)):
            connection.send_command("CLIENT", "ID")
            try:
                self._client_id = (socket_of(connection), int(connection.read_response()))
            except ResponseError as error:
                self._give_up(error)

    def ask_again(self) -> None:
        """Ends a BRPOP that waits without a model which has room by now; kombu then sends the next one."""
        channel = self._channel
        if not waits_for_message(channel) or self._client_id is None or self._asked.issuperset(self._open_queues()):
            return
        try:
            with channel.conn_or_acquire() as client:
                if client.client_unblock(self._client_id[1]):
                    self._asked = frozenset(self._open_queues())  # once is enough
        except ResponseError as error:
            self._give_up(error)

    def _give_up(self, error: ResponseError) -> None:
        log.warning("a model whose jobs have just ended may wait up to 1 s for the next one: %s", error)
        self._client_id, self._may_unblock = None, False


def keep_client(channel: Any, on_publish: Callable[[str, int], None] | None = None) -> None:
    """Lets a channel use one client for its commands; kombu makes one for each, which takes longer than the command.

    `on_publish` hears of each topic that it publishes to, and how many listened.
    """
    kept: dict[Any, Any] = {}  # pool → its client

    def once(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_once(asynchronous: bool = False) -> Any:
            if asynchronous:  # for the connections that the event loop listens on
                return create(asynchronous=True)
            pool = channel.pool
            if pool not in kept:
                kept.clear()
                kept[pool] = create()
                if on_publish is not None:
                    _tell_published(kept[pool], on_publish)
            return kept[pool]

        return create_once

    make_clients_by(channel, once)


def _tell_published(client: Any, on_publish: Callable[[str, int], None]) -> None:
    publish = client.publish

    def publish_and_tell(topic: str, *args: Any, **options: Any) -> Any:
        num_listeners = publish(topic, *args, **options)
        on_publish(topic, num_listeners)
        return num_listeners

    client.publish = publish_and_tell


def _contained(deliver_one: Callable[[Any], None], what: Any) -> None:
    """Delivers a message. What is none is dropped: it must not end the worker, to which it would come again."""
    try:
        deliver_one(what)
    except NO_MESSAGE:
        log.exception("something in a queue is no message, and was dropped")
