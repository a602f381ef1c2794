"""What was said of models at run time, in a real Redis: several workers, lost data, hostile entries, outages."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from cellama.config import ModelSettings
from cellama.tasks.contract.keys import wanted_key
from cellama.tasks.worker import wanted_record
from cellama.tasks.worker.wanted import Key, Said, field_of, model_key
from cellama.tasks.worker.wanted_record import KEPT_S, MAX_ENTRIES, WantedRecord

NewRecord = Callable[[str], WantedRecord]
KEY = model_key("big")


@pytest.fixture
def pool() -> str:
    return f"p{uuid.uuid4().hex[:8]}"


@pytest.fixture
def record_of(redis_client: Redis, pool: str) -> NewRecord:
    """The record as a worker of that name sees it."""
    return lambda worker: WantedRecord(redis_client, pool, f"{worker}@{pool}")


def said(source: str) -> Said:
    return Said(model=ModelSettings(id="big", source=source))


def source(record: WantedRecord, key: Key = KEY) -> str | None:
    found = record.look().of(key)[0]
    return found.model.source if found is not None and found.model is not None else None


def test_what_one_worker_says_for_its_pool_all_of_it_read(record_of: NewRecord) -> None:
    one, other = record_of("one"), record_of("other")
    one.say(KEY, said("pool.gguf"), whole_pool=True)
    other.say(KEY, said("own.gguf"), whole_pool=False)
    assert (source(one), source(other), source(record_of("new"))) == ("pool.gguf", "own.gguf", "pool.gguf")
    other.say(KEY, Said(gone=True), whole_pool=True)  # for the whole pool: nothing of its own is left
    assert [source(record) for record in (one, other, record_of("new"))] == [None] * 3


def test_one_of_several_that_say_at_once_counts_for_all(record_of: NewRecord) -> None:
    records = [record_of(f"w{number}") for number in range(8)]
    for record in records:
        assert record.look().of(KEY)[0] is None
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda r: r[1].say(KEY, said(f"{r[0]}.gguf"), whole_pool=True, before=""), enumerate(records)))
    assert len({source(record) for record in records}) == 1


def test_what_redis_has_lost_or_rolled_back_is_written_again(
    redis_client: Redis, pool: str, record_of: NewRecord
) -> None:
    one, name = record_of("one"), wanted_key("pool", pool)
    one.say(KEY, said("old.gguf"), whole_pool=True)
    old: Any = redis_client.hgetall(name)
    one.say(KEY, said("new.gguf"), whole_pool=True)
    redis_client.delete(name)
    assert (source(one), source(record_of("other"))) == ("new.gguf", "new.gguf")
    redis_client.hset(name, mapping=old)
    assert (source(one), source(record_of("other"))) == ("new.gguf", "new.gguf")
    assert 0 < redis_client.ttl(name) <= KEPT_S


def test_entries_that_cannot_be_read_stop_no_other(redis_client: Redis, pool: str, record_of: NewRecord) -> None:
    one, name = record_of("one"), wanted_key("pool", pool)
    one.say(KEY, said("big.gguf"), whole_pool=True)
    bad = {field_of(model_key(name)): text for name, text in (("a", "{"), ("b", "[" * 9999), ("c", "x" * 99999))}
    redis_client.hset(name, mapping={"": "", "\x00": "x", "[" * 9999: "x", '["default"]': '{"at":1e999}', **bad})
    new = record_of("new")
    assert source(new) == "big.gguf"
    assert set(new.spoken.unreadable) == {("default",), *(model_key(name) for name in "abc")}
    new.say(model_key("a"), Said(gone=True), whole_pool=True)
    assert model_key("a") not in record_of("other").look().unreadable


@pytest.mark.parametrize("bad", ["type", "size"])
def test_record_that_is_no_record_changes_nothing_of_what_is_known(
    redis_client: Redis, pool: str, record_of: NewRecord, bad: str
) -> None:
    one, name = record_of("one"), wanted_key("pool", pool)
    one.say(KEY, said("big.gguf"), whole_pool=True)
    redis_client.delete(name)
    if bad == "type":
        redis_client.set(name, "text")
    else:
        redis_client.hset(name, mapping={str(number): "x" for number in range(MAX_ENTRIES + 1)})
    assert source(one) == "big.gguf"
    assert source(record_of("new")) is None
    redis_client.delete(name)
    assert [source(one), source(record_of("new"))] == ["big.gguf", "big.gguf"]


def test_what_is_said_while_redis_is_away_is_written_once_it_is_back(
    record_of: NewRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise RedisConnectionError("away")

    one = record_of("one")
    with monkeypatch.context() as outage:
        outage.setattr(wanted_record, "run_script", away)
        one.say(KEY, said("big.gguf"), whole_pool=True)
        assert one.spoken.of(KEY)[0] is not None
        with pytest.raises(RedisConnectionError):
            one.look()
    assert source(record_of("other")) is None
    assert source(one) == "big.gguf"
    assert source(record_of("other")) == "big.gguf"


def test_what_is_gone_is_forgotten_in_the_end(
    redis_client: Redis, pool: str, record_of: NewRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = record_of("one")
    one.say(KEY, Said(gone=True), whole_pool=True)
    assert redis_client.hlen(wanted_key("pool", pool)) == 1
    monkeypatch.setattr(wanted_record, "KEPT_S", -1)
    one.look()
    assert redis_client.hlen(wanted_key("pool", pool)) == 0


def test_load_that_does_not_end_is_not_begun_for_ever(record_of: NewRecord) -> None:
    assert [record_of("one").begin_trial(KEY, 3) for _ in range(5)] == [True, True, True, False, False]
    record_of("one").end_trial(KEY)
    assert record_of("one").begin_trial(KEY, 3)
