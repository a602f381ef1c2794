"""The channel that holds a message, which changes with each reconnect to Redis."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kombu.transport.virtual import Message

from cellama.tasks.broker.consumer import ReconnectingConsumer


@pytest.mark.parametrize(("priority", "is_bulk"), [(None, False), (0, False), (5, False), (6, True), (9, True)])
def test_message_moves_to_the_channel_of_its_priority_after_a_reconnect(priority: int | None, is_bulk: bool) -> None:
    urgent, bulk, of_yesterday = (SimpleNamespace(connection=object()) for _ in range(3))
    consumer = ReconnectingConsumer.__new__(ReconnectingConsumer)
    consumer.connection = object()
    consumer.task_consumer, consumer.bulk_consumer = SimpleNamespace(channel=urgent), SimpleNamespace(channel=bulk)
    properties = {"delivery_tag": "t", "delivery_info": {"exchange": "", "routing_key": "q"}, "priority": priority}
    message = Message({"properties": properties, "headers": {}}, channel=of_yesterday)
    assert consumer.channel_of(message) is (bulk if is_bulk else urgent)
    message.channel = urgent
    assert consumer.channel_of(message) is urgent  # it holds the message
