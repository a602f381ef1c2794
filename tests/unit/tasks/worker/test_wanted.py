"""What a worker was given at run time, stored for its successor."""

from __future__ import annotations

from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from cellama.config import ModelSettings
from cellama.tasks.worker.wanted import Wanted, WantedKeeper, wanted_of_json

SECOND = ModelSettings(id="second", source="bundled://tiny", n_parallel=2, hub_token="hidden", adapters={"a": "x.gguf"})
WANTED = Wanted((SECOND,), {"first": {"b": ("y.gguf", 0.5)}}, "second")


class MemoryRedis:
    """Keeps strings; away while told so."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.num_writes = 0
        self.away = False

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def set(self, key: str, value: str, ex: int) -> None:
        assert ex > 0
        self._write()
        self.values[key] = value

    def delete(self, key: str) -> None:
        self._write()
        self.values.pop(key, None)

    def _write(self) -> None:
        if self.away:
            raise RedisConnectionError("away")
        self.num_writes += 1


def keeper_of(redis: MemoryRedis) -> WantedKeeper:
    return WantedKeeper(redis, "w@host")  # type: ignore[arg-type]


def test_wanted_is_stored_without_secrets_and_read_as_it_was() -> None:
    assert "hidden" not in WANTED.to_json()
    found = wanted_of_json(WANTED.to_json())
    assert found == Wanted((SECOND.model_copy(update={"hub_token": None}),), WANTED.adapters, "second")
    assert found.models[0].model_fields_set == SECOND.model_fields_set - {"hub_token"}


def test_model_that_this_version_does_not_know_is_left_out() -> None:
    text = WANTED.to_json().replace("n_parallel", "n_of_tomorrow")
    assert wanted_of_json(text) == Wanted((), WANTED.adapters, "second")


def test_nothing_is_stored_before_all_is_brought_back() -> None:
    redis = MemoryRedis()
    redis.values["cellama:wanted:w@host"] = WANTED.to_json()
    keeper = keeper_of(redis)
    keeper.look()
    assert keeper.read().default == "second"
    keeper.keep(Wanted)
    assert redis.values == {}


@pytest.mark.parametrize("wanted", [WANTED, Wanted()])
def test_changes_are_stored_once_and_again_after_redis_was_away(wanted: Any) -> None:
    redis = MemoryRedis()
    keeper = keeper_of(redis)
    redis.away = True
    keeper.keep(lambda: wanted)
    redis.away = False
    keeper.look()
    keeper.look()
    assert redis.num_writes == 1
    assert keeper_of(redis).read().default == wanted.default
