"""What a channel asks Redis for, on a connection that only notes commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.utils.scheduling import round_robin_cycle
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from cellama.tasks.broker.channels import Asker
from cellama.tasks.broker.places import Places
from cellama.tasks.contract.names import PRIORITY_SEPARATOR, queue_key, queue_name

A, B = queue_name("a"), queue_name("b")


class Connection:
    _sock = object()

    def __init__(self) -> None:
        self.commands: list[tuple[Any, ...]] = []
        self._deliver: Any = None

    def send_command(self, *command: Any) -> None:
        self.commands.append(command)

    def read_response(self) -> int:
        return 7


class Channel:
    """As much of kombu's as is asked; `held` is what the worker holds of each queue."""

    brpop_timeout = 1

    def __init__(self) -> None:
        self.active_queues = [A, B]
        self._queue_cycle = round_robin_cycle([A, B])
        self._in_poll: Any = None
        self.connection = Connection()
        self.client = SimpleNamespace(connection=self.connection)
        self.held: dict[str, list[int]] = {}
        self.places = Places({"a": 2, "b": 2}, 0, lambda: "a")
        self.handlers: dict[str, Any] = {}
        self.sep = PRIORITY_SEPARATOR
        self.qos = SimpleNamespace(open_queues=self._open_queues, room_of=self._room_of)
        self.unblocked: list[int] = []
        self.refuses = False
        self._brpop_start: Any = None
        self._brpop_read: Any = None

    def _room_of(self, queues: Sequence[str]) -> dict[str, int]:
        return self.places.room_for_urgent(queues, self.held)

    def _open_queues(self, queues: Sequence[str]) -> list[str]:
        return [queue for queue, room in self._room_of(queues).items() if room]

    @contextlib.contextmanager
    def conn_or_acquire(self) -> Iterator[Any]:
        yield SimpleNamespace(client_unblock=self._unblock)

    def _unblock(self, client_id: int) -> bool:
        if self.refuses:
            raise NoPermissionError("no permission to run 'client|unblock'")
        self.unblocked.append(client_id)
        return True

    def asked(self) -> list[str]:
        command = self.connection.commands[-1]
        assert (command[0], command[-1]) == ("BRPOP", 1)
        return list(command[1:-1])


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def asker(channel: Channel) -> Asker:
    return Asker(channel, lambda: channel.places, (0, 3))


def test_channel_asks_model_by_model_and_the_most_urgent_first(channel: Channel, asker: Asker) -> None:
    channel._brpop_start()
    assert channel.asked() == [A, queue_key(A, 3), B, queue_key(B, 3)]
    channel._queue_cycle.rotate(A)  # as kombu does with the queue of each message
    channel._brpop_start()
    assert channel.asked() == [B, queue_key(B, 3), A, queue_key(A, 3)]


def test_channel_asks_only_for_models_with_room_and_again_when_others_have_some(channel: Channel, asker: Asker) -> None:
    channel.held = {A: [1, 1]}
    channel._brpop_start()
    assert channel.asked() == [B, queue_key(B, 3)]
    asker.ask_again()
    assert channel.unblocked == []
    channel.held = {A: [1], B: [1, 1]}
    asker.ask_again()
    asker.ask_again()
    assert channel.unblocked == [7]  # once, until the next one is sent
    channel._brpop_start()
    assert channel.asked() == [A, queue_key(A, 3)]


def test_channel_without_room_asks_for_nothing(channel: Channel, asker: Asker) -> None:
    channel.held = {A: [1, 1], B: [1, 1]}
    channel._brpop_start()
    assert channel.connection.commands == []


def test_channel_goes_on_without_permission_to_unblock(
    channel: Channel, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    channel.held, channel.refuses = {A: [1, 1]}, True
    channel._brpop_start()
    channel.held = {}
    asker.ask_again()
    asker.ask_again()
    assert caplog.text.count("may wait up to 1 s") == 1
    channel._brpop_start()
    assert A in channel.asked()


def test_page_has_room_for_what_is_left_beside_the_message_that_brings_it(channel: Channel, asker: Asker) -> None:
    channel.held = {B: [1]}
    assert channel.qos.room_beside(A) == [(1, [A, queue_key(A, 3)]), (1, [B, queue_key(B, 3)])]
    assert channel.qos.room_beside(B) == [(2, [A, queue_key(A, 3)])]


def test_messages_of_a_page_are_delivered_after_the_one_that_brought_them(channel: Channel, asker: Asker) -> None:
    delivered: list[tuple[Any, str]] = []
    channel._brpop_read = lambda: delivered.append(("first", A))
    channel.connection._deliver = lambda message, queue: delivered.append((message, queue))
    channel.qos.take_page = lambda: [SimpleNamespace(key=queue_key(B, 3), payload=b'"second"')]
    channel.handlers["BRPOP"]()
    assert delivered == [("first", A), ("second", B)]


def test_what_is_no_message_is_dropped_and_the_others_are_delivered(
    channel: Channel, asker: Asker, caplog: Any
) -> None:
    delivered: list[tuple[Any, str]] = []
    channel._brpop_read = lambda: json.loads("nan")
    channel.connection._deliver = lambda message, queue: delivered.append((message, queue))
    payloads = [b'{"sent": nan}', b"\xff", b'"second"']
    channel.qos.take_page = lambda: [SimpleNamespace(key=queue_key(B, 3), payload=payload) for payload in payloads]
    channel.handlers["BRPOP"]()
    assert delivered == [("second", B)]
    assert caplog.text.count("is no message") == 3


def test_a_message_that_can_not_be_taken_is_told_to_celery(channel: Channel, asker: Asker) -> None:
    def lose_connection() -> None:
        raise RedisConnectionError("gone")

    channel._brpop_read = lose_connection
    channel.qos.take_page = list
    with pytest.raises(RedisConnectionError):
        channel.handlers["BRPOP"]()
