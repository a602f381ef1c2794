"""The publisher: numbering, one pipeline for many events, retries that change nothing."""

from __future__ import annotations

import json
import threading
from typing import Any

import fakeredis
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cellama.config import Settings
from cellama.engine import Completion, DecodeFailed, Finished, Started, Text, Timings, Usage
from cellama.tasks.contract import events
from cellama.tasks.contract.keys import journal_key
from cellama.tasks.publisher import Publisher

COMPLETION = Completion("ab", (1, 2), "stop", None, Usage(3, 2), Timings(1.0, 2.0, 3.0, None, None), 0, 7)


@pytest.fixture
def redis() -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis()


def journal(redis: fakeredis.FakeRedis, job_id: str) -> list[dict[str, Any]]:
    entries: Any = redis.xrange(journal_key(job_id))
    return [json.loads(fields[b"event"]) for _, fields in entries]


def test_publisher_numbers_each_job_by_itself(redis: fakeredis.FakeRedis) -> None:
    publisher = Publisher(redis, Settings(), "w")
    tell = publisher.listener("tiny")
    tell((Started("a", 0, 3, 0), Started("b", 1, 3, 0)))
    tell((Text("a", "x", (1,)), Text("b", "y", (2,)), Text("a", "z", (3,))))
    tell((Finished("a", COMPLETION), Finished("b", error=DecodeFailed("no"))))
    assert publisher.close()
    assert [(e["seq"], e["type"]) for e in journal(redis, "a")] == [
        *((0, "started"), (1, "token"), (2, "token"), (3, "done"))
    ]
    assert journal(redis, "a")[0] == {"seq": 0, "type": "started", "model": "tiny", "prompt_tokens": 3, "worker": "w"}
    assert journal(redis, "b")[-1] == {"seq": 2, **events.error("decode_failed", "no", True)}
    assert 0 < redis.ttl(journal_key("a")) <= 3600
    assert publisher._next_seq == {}


def test_publisher_journal_of_an_unfinished_job_goes_away_too(redis: fakeredis.FakeRedis) -> None:
    publisher = Publisher(redis, Settings(), "w")
    publisher.publish("a", events.started("tiny", 1, "w"))
    assert publisher.close()
    assert 3600 < redis.ttl(journal_key("a")) <= 86400


def test_publisher_goes_on_when_redis_refuses_the_events_of_one_job(redis: fakeredis.FakeRedis) -> None:
    redis.set(journal_key("broken"), "not a stream")
    publisher = Publisher(redis, Settings(), "w")
    publisher.publish("broken", events.done("stop", {}))
    publisher.publish("good", events.done("stop", {}))
    assert publisher.close()
    assert [e["seq"] for e in journal(redis, "good")] == [0]


class Flaky(fakeredis.FakeRedis):
    """Loses the reply of the first pipeline after it was executed, and never gets the second one."""

    calls = 0

    def pipeline(self, *args: Any, **kwargs: Any) -> Any:
        pipeline = super().pipeline(*args, **kwargs)
        execute = pipeline.execute
        Flaky.calls += 1
        call = Flaky.calls

        def broken(*args: Any, **kwargs: Any) -> Any:
            if call == 2:
                raise RedisConnectionError("gone")
            replies = execute(*args, **kwargs)
            if call == 1:
                raise RedisConnectionError("the reply is lost")
            return replies

        pipeline.execute = broken
        return pipeline


def test_publisher_writes_each_event_once_although_replies_are_lost() -> None:
    redis = Flaky()
    publisher = Publisher(redis, Settings(), "w")
    publisher.publish("a", events.started("tiny", 1, "w"))
    publisher.publish("a", events.done("stop", {}))
    done = threading.Event()
    for _ in range(600):
        if len(journal(redis, "a")) == 2 and Flaky.calls >= 3:
            break
        done.wait(0.05)
    assert publisher.close()
    assert [e["seq"] for e in journal(redis, "a")] == [0, 1]
    assert Flaky.calls >= 3
