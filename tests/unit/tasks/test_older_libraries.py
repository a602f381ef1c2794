"""Replacements for parts that Celery and kombu have since version 5.7. `make producers` runs them with old versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from cellama.tasks.connection import kombu_internals
from cellama.tasks.connection.kombu_internals import is_sending_next_step, publish_into, send_next_step, take_connection


class Channel:
    """A channel of kombu 5.5, which sends each message with a client of its own."""

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        yield {"client": client}

    def basic_publish(self, message: Any, exchange: str, routing_key: str) -> None:
        with self.conn_or_acquire() as client:
            client.publish(exchange, message) if exchange else client.lpush(routing_key, message)


class Batch(list[Any]):
    def add(self, *command: Any) -> None:
        self.append(command)


def test_older_kombu_publishes_into_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kombu_internals, "HAS_PUBLISH_BATCH", False)
    channel, batch = Channel(), Batch()
    publish_into(batch, channel, {"body": "job"}, "", "queue")
    publish_into(batch, channel, {"body": "event"}, "events", "")
    assert batch == [("lpush", "queue", {"body": "job"}), ("publish", "events", {"body": "event"})]
    with channel.conn_or_acquire(1) as client:
        assert client == {"client": 1}


def test_next_step_is_detected_by_its_caller_when_celery_is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kombu_internals, "HAS_PUBLISH_RETRY", False)
    tracer = ModuleType("celery.app.trace")
    exec("def trace(call):\n    return call()", vars(tracer))
    assert vars(tracer)["trace"](is_sending_next_step)
    assert not vars(tracer)["trace"](lambda: is_sending_next_step())  # the lambda stands for the task of a user
    assert not is_sending_next_step()


def test_older_celery_sends_the_next_step_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kombu_internals, "HAS_PUBLISH_RETRY", False)
    sent: list[Any] = []
    send_next_step(None, lambda *args, **options: sent.append((args, options)), "result", chain=[])  # type: ignore[arg-type]
    assert sent == [(("result",), {"chain": []})]


def test_older_redis_py_requires_a_command_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kombu_internals, "CONNECTION_ARGS", ("PING",))

    class Pool:
        def get_connection(self, command: str) -> str:
            return command

    assert take_connection(Pool()) == "PING"
