"""The reader of a channel's queues, on a connection that only records commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.utils.scheduling import round_robin_cycle
from redis.exceptions import ConnectionError as RedisConnectionError, NoPermissionError

from cellama.tasks.broker.consumer import FULL_S, JobLimits, QueueReader
from cellama.tasks.contract.names import PRIORITY_SEPARATOR, SUBMITTED_AT_HEADER, TOKEN_HEADER, queue_key, queue_name
from cellama.tasks.state.ledger import Fetched, JobsLeft, PageLimits, Taken

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
    """The part of kombu's channel that the reader uses. `held` has the weights of held messages by queue."""

    brpop_timeout = 1
    do_restore = False
    connection_errors = (RedisConnectionError,)

    def __init__(self) -> None:
        self.active_queues = [A, B]
        self._queue_cycle = round_robin_cycle([A, B])
        self._in_poll: Any = None
        self.connection = Connection()
        self.client = SimpleNamespace(connection=self.connection, parse_response=self._parse_response)
        self.answer: Any = None
        self.held: dict[str, list[int]] = {}
        self.job_limits = JobLimits({"a": 2, "b": 2}, 0, lambda: "a")
        self.handlers: dict[str, Any] = {}
        self.sep = PRIORITY_SEPARATOR
        self.unblocked: list[int] = []
        self.refuses = False
        self._brpop_start: Any = None
        self._qos: Any = None

    def _parse_response(self, connection: Any, command: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    @contextlib.contextmanager
    def conn_or_acquire(self) -> Iterator[Any]:
        yield SimpleNamespace(client_unblock=self._unblock)

    def _unblock(self, client_id: int) -> bool:
        if self.refuses:
            raise NoPermissionError("no permission to run 'client|unblock'")
        self.unblocked.append(client_id)
        return True

    def requested(self) -> list[str]:
        command = self.connection.commands[-1]
        assert (command[0], command[-1]) == ("BRPOP", 1)
        return list(command[1:-1])


@pytest.fixture
def channel() -> Channel:
    return Channel()


class TakingLedger:
    """A ledger that returns the job of each ticket and a page, and records the limits of pages."""

    def __init__(self) -> None:
        self.page: list[Fetched] = []
        self.limits: list[PageLimits] = []
        self.leaves_jobs = False

    def take(self, key: str, ticket_id: str, lease_s: float, limits: PageLimits, **options: Any) -> list[Fetched]:
        self.limits.append(limits)
        if self.leaves_jobs:
            raise JobsLeft(0.5)
        return [Fetched(key, b"", Taken(ticket_id, f"token of {ticket_id}")), *self.page]


@pytest.fixture
def ledger() -> TakingLedger:
    return TakingLedger()


@pytest.fixture
def reader(channel: Channel, ledger: Any) -> QueueReader:
    reader = QueueReader(channel, ledger, 10.0, job_limits=lambda: channel.job_limits, priorities=(0, 3))
    channel._qos.held = lambda: channel.held
    return reader


def test_bulk_channel_requests_guaranteed_jobs_even_when_urgent_jobs_fill_the_worker(ledger: Any) -> None:
    channels = Channel(), Channel()
    jobs = JobLimits({"a": 2, "b": 2}, 0, lambda: "a", {"a": 1, "b": 0}.__getitem__)
    make_reader = partial(QueueReader, ledger=ledger, lease_s=10.0, job_limits=lambda: jobs)
    urgent = make_reader(channels[0], priorities=(0, 3))
    bulk = make_reader(channels[1], priorities=(6,), before=[urgent])
    for channel in channels:
        channel._qos.held = lambda channel=channel: channel.held
    channels[0].held = {A: [1, 1], B: [1, 1]}
    channels[1]._brpop_start()
    assert channels[1].requested() == [queue_key(A, 6)]
    channels[1].held = {A: [1]}
    assert bulk.capacity([A, B]) == {A: 0, B: 0}
    channels[0].held = {}
    assert bulk.capacity([A, B]) == {A: 1, B: 2}
    assert urgent.capacity([A, B]) == {A: 2, B: 2}


def message_of(job_id: str) -> bytes:
    return json.dumps({"headers": {"id": job_id, SUBMITTED_AT_HEADER: 1.0}}).encode()


def page_of(*payloads: bytes) -> list[Fetched]:
    return [Fetched(queue_key(B, 3), payload, Taken("", f"token {i}")) for i, payload in enumerate(payloads)]


@pytest.fixture
def delivered(channel: Channel) -> list[tuple[str, str, str]]:
    """Return a list to which the id, token and queue of each delivered message are added."""
    found: list[tuple[str, str, str]] = []

    def deliver(message: dict[str, Any], queue: str) -> None:
        found.append((message["headers"]["id"], message["headers"].get(TOKEN_HEADER), queue))

    channel.connection._deliver = deliver
    return found


def test_reader_requests_messages_model_by_model_with_the_most_urgent_first(
    channel: Channel, reader: QueueReader
) -> None:
    channel._brpop_start()
    assert channel.requested() == [A, queue_key(A, 3), B, queue_key(B, 3)]
    channel._queue_cycle.rotate(A)  # as kombu does with the queue of each message
    channel._brpop_start()
    assert channel.requested() == [B, queue_key(B, 3), A, queue_key(A, 3)]


def test_reader_sends_another_brpop_when_a_model_gains_capacity(channel: Channel, reader: QueueReader) -> None:
    channel.held = {A: [1, 1]}
    channel._brpop_start()
    assert channel.requested() == [B, queue_key(B, 3)]
    reader.request_again()
    assert channel.unblocked == []
    channel.held = {A: [1], B: [1, 1]}
    reader.request_again()
    reader.request_again()
    assert channel.unblocked == [7]  # once, until the next one is sent
    channel._brpop_start()
    assert channel.requested() == [A, queue_key(A, 3)]


def test_reader_omits_a_model_while_it_leaves_its_jobs_to_other_workers(
    channel: Channel, ledger: TakingLedger, reader: QueueReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("cellama.tasks.broker.consumer.time.monotonic", lambda: now)
    ledger.leaves_jobs = True
    channel.answer = (queue_key(A, 3).encode(), message_of("one"))
    channel.handlers["BRPOP"]()
    channel._brpop_start()
    assert channel.requested() == [B, queue_key(B, 3)]
    channel.answer = (queue_key(B, 3).encode(), message_of("two"))
    channel.handlers["BRPOP"]()
    assert ledger.limits[-1] == [(1, [B, queue_key(B, 3)])]  # no page of the other model
    now = 100.6
    channel._brpop_start()
    assert set(channel.requested()) == {A, queue_key(A, 3), B, queue_key(B, 3)}


def test_reader_sends_no_brpop_without_capacity(channel: Channel, reader: QueueReader) -> None:
    channel.held = {A: [1, 1], B: [1, 1]}
    channel._brpop_start()
    assert channel.connection.commands == []


def test_reader_continues_without_permission_to_unblock(
    channel: Channel, reader: QueueReader, caplog: pytest.LogCaptureFixture
) -> None:
    channel.held, channel.refuses = {A: [1, 1]}, True
    channel._brpop_start()
    channel.held = {}
    reader.request_again()
    reader.request_again()
    assert caplog.text.count("may wait up to 1 s") == 1
    channel._brpop_start()
    assert A in channel.requested()


@pytest.mark.parametrize(
    ("queue", "page"),
    [(A, [(1, [A, queue_key(A, 3)]), (1, [B, queue_key(B, 3)])]), (B, [(2, [A, queue_key(A, 3)])])],
)
@pytest.mark.usefixtures("reader", "delivered")
def test_page_of_messages_uses_the_capacity_that_remains_after_the_first_message(
    channel: Channel, ledger: TakingLedger, queue: str, page: PageLimits
) -> None:
    channel.held = {B: [1]}
    channel.answer = (queue_key(queue, 0).encode(), message_of("one"))
    channel.handlers["BRPOP"]()
    assert ledger.limits == [page]


@pytest.mark.usefixtures("reader")
def test_messages_of_a_page_are_delivered_after_the_first_message(
    channel: Channel, ledger: TakingLedger, delivered: list[tuple[str, str, str]]
) -> None:
    channel.answer = (queue_key(A, 0).encode(), message_of("one"))
    ledger.page = page_of(message_of("two"))
    channel.handlers["BRPOP"]()
    assert delivered == [("one", "token of one", A), ("two", "token 0", B)]


@pytest.mark.usefixtures("reader")
def test_message_from_plain_celery_is_delivered_without_a_token(
    channel: Channel, ledger: TakingLedger, delivered: list[tuple[str, Any, str]]
) -> None:
    channel.answer = (queue_key(A, 0).encode(), json.dumps({"headers": {"id": "one", TOKEN_HEADER: "t"}}).encode())
    channel.handlers["BRPOP"]()
    assert delivered == [("one", None, A)]
    assert ledger.limits == []


@pytest.mark.usefixtures("reader")
def test_malformed_message_is_dropped_and_other_messages_are_delivered(
    channel: Channel, ledger: TakingLedger, delivered: list[tuple[str, str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    for payload in (b"nan?", b"[]", b'{"headers": 1}', b"\xff"):
        channel.answer = (queue_key(A, 0).encode(), payload)
        channel.handlers["BRPOP"]()
    channel.answer = (queue_key(A, 0).encode(), message_of("one"))
    ledger.page = page_of(b'{"sent": nan}', message_of("two"))
    channel.handlers["BRPOP"]()
    assert delivered == [("one", "token of one", A), ("two", "token 1", B)]
    assert caplog.text.count("malformed message dropped") == 5


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize(("answer", "expected"), [(RedisConnectionError("gone"), RedisConnectionError), (None, Empty)])
def test_reply_without_a_message_raises_the_error_that_kombu_expects(
    channel: Channel, answer: Any, expected: type[Exception]
) -> None:
    channel.connection.disconnect = lambda: None  # type: ignore[attr-defined]
    channel.answer = answer
    with pytest.raises(expected):
        channel.handlers["BRPOP"]()


def test_reader_requests_only_protected_jobs_when_less_urgent_jobs_use_up_the_capacity(
    channel: Channel, reader: QueueReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("cellama.tasks.broker.consumer.time.monotonic", lambda: now)
    channel.held = {A: [1, 1], B: [1, 1]}
    reader.note_full_models()
    assert not reader.can_take(), "jobs of milliseconds soon free capacity"
    now += FULL_S
    reader.note_full_models()
    assert reader.can_take()
    channel._brpop_start()
    assert channel.requested() == [queue_key(A, 0), queue_key(B, 0)]
    channel.held = {A: [1, 1]}
    reader.note_full_models()
    reader.request_again()
    assert channel.unblocked == [7]
    channel._brpop_start()
    assert channel.requested() == [queue_key(A, 0), queue_key(B, 0), queue_key(B, 3)]


def test_reader_takes_as_many_protected_jobs_as_an_empty_worker(
    channel: Channel, ledger: TakingLedger, reader: QueueReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("cellama.tasks.broker.consumer.time.monotonic", lambda: now)
    protected: dict[str, list[int]] = {A: [1]}
    channel.held, channel._qos.held_protected = {A: [1, 1, 1], B: [1, 1]}, lambda: protected
    reader.note_full_models()
    now += FULL_S
    channel.answer = (queue_key(B, 0).encode(), message_of("one"))
    channel.handlers["BRPOP"]()
    assert ledger.limits == [[(1, [queue_key(A, 0)]), (1, [queue_key(B, 0)])]]
    protected[A].append(1)
    channel._brpop_start()
    assert channel.requested() == [queue_key(B, 0)]
