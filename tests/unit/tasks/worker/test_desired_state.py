"""A worker's desired state consists of its settings, overridden by its pool's record, and then by its own record."""

from __future__ import annotations

import json
import time
from typing import Any

import fakeredis
import pytest

from cellama.config import ModelSettings, Settings
from cellama.config.settings import AdapterSettings
from cellama.engine import ModelLoadFailed
from cellama.tasks.contract.keys import desired_state_key
from cellama.tasks.worker.desired_state import (
    DEFAULT_KEY,
    MAX_CRASHED_LOADS,
    RECORD_TTL_S,
    Correction,
    DesiredStateRecord,
    Key,
    Override,
    Overrides,
    adapter_key,
    corrections,
    desired_state,
    field_of,
    key_of,
    model_key,
    override_of,
)

PIRATE = AdapterSettings(source="pirate.gguf", scale=0.5)
FIRST = ModelSettings(id="first", source="first.gguf", adapters={"own": {"source": "own.gguf"}})
OTHER = FIRST.model_copy(update={"source": "other.gguf"})
SECOND = ModelSettings(id="second", source="second.gguf", n_parallel=2)
SETTINGS = Settings(models=(FIRST,))
GONE = Override(gone=True)
POOL = desired_state_key("pool", "p")


def of_pool(entries: dict[Key, Override]) -> Overrides:
    return {key: (override, "pool") for key, override in entries.items()}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, {"first": ("first.gguf", "settings")}),
        ({model_key("first"): GONE}, {}),
        ({model_key("first"): Override(model=OTHER)}, {"first": ("other.gguf", "pool")}),
        (
            {model_key("second"): Override(model=SECOND)},
            {"first": ("first.gguf", "settings"), "second": ("second.gguf", "pool")},
        ),
    ],
)
def test_entries_from_commands_override_the_settings(
    entries: dict[Key, Override], expected: dict[str, tuple[str, str]]
) -> None:
    desired = desired_state(SETTINGS, of_pool(entries))
    found = {id_: (model.source, desired.origins[model_key(id_)]) for id_, model in desired.models.items()}
    assert found == expected


def test_desired_adapters_and_default_belong_to_desired_models() -> None:
    overrides = of_pool(
        {
            model_key("second"): Override(model=SECOND),
            adapter_key("second", "pirate"): Override(adapter=PIRATE),
            adapter_key("first", "own"): GONE,
            adapter_key("nowhere", "pirate"): Override(adapter=PIRATE),
            DEFAULT_KEY: Override(default="second"),
        }
    )
    desired = desired_state(SETTINGS, overrides)
    assert [*desired.adapters] == [adapter_key("second", "pirate")]
    assert [model.adapters for model in desired.models.values()] == [{}, {"pirate": PIRATE}]
    assert desired.default == "second"
    assert desired_state(SETTINGS, of_pool({DEFAULT_KEY: Override(default="nowhere")})).default is None


def test_corrections_produce_the_desired_state_and_start_with_unloads() -> None:
    overrides = of_pool(
        {
            model_key("second"): Override(model=SECOND),
            adapter_key("first", "pirate"): Override(adapter=PIRATE),
            adapter_key("first", "own"): Override(adapter=AdapterSettings(source="own.gguf", scale=0.1)),
        }
    )
    desired = desired_state(SETTINGS, overrides)
    old = SECOND.model_copy(update={"n_parallel": 4})
    loaded = {"first": FIRST, "second": old, "third": SECOND}
    adapters = {adapter_key("first", "own"): FIRST.adapters["own"], adapter_key("first", "left"): PIRATE}
    assert list(corrections(desired, loaded, adapters)) == [
        Correction("unload", model_key("second")),
        Correction("unload", model_key("third")),
        Correction("scale", adapter_key("first", "own")),
        Correction("unload", adapter_key("first", "left")),
        Correction("load", adapter_key("first", "pirate")),
    ]
    assert list(corrections(desired, {"first": FIRST, "second": SECOND}, desired.adapters)) == []


@pytest.mark.parametrize("model", [SECOND, SECOND.model_copy(update={"hub_token": "hidden", "default": True})])
def test_entry_is_unchanged_after_writing_and_reading_and_contains_no_secrets(model: ModelSettings) -> None:
    text = Override(at=1.5, model=model).text()
    assert "hidden" not in text
    assert override_of(model_key("second"), text) == Override(at=1.5, model=SECOND)


@pytest.mark.parametrize(
    "field", [b"", b"model", b"{}", b"[]", b'["model"]', b'["thing","x"]', b'["model",1]', b'["model", "x"]', b"\xff"]
)
def test_invalid_key_is_rejected(field: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        key_of(field)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        {"at": 1},
        {"at": 1, "model": {"id": "other", "source": "x"}},
        {"at": 1, "model": {"id": "second"}},
        {"at": 1, "model": {"id": "second", "source": "x", "n_of_tomorrow": 1}},
        {"at": 1, "gone": True, "model": {"id": "second", "source": "x"}},
        {"at": 1, "adapter": {"source": "x"}},
        {"at": "now", "gone": True},
    ],
)
def test_entry_that_does_not_match_its_key_is_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        override_of(model_key("second"), json.dumps(value))


def test_worker_entry_overrides_its_pool_and_applies_to_no_other_worker() -> None:
    redis = fakeredis.FakeRedis()
    one, two = (DesiredStateRecord(redis, "p", name) for name in ("one", "two"))
    one.write(model_key("second"), Override(model=SECOND), whole_pool=True)
    one.write(model_key("second"), GONE, whole_pool=False)
    assert one.read()[model_key("second")][1] == "worker"
    assert two.read()[model_key("second")][1] == "pool"
    one.write(model_key("second"), Override(model=SECOND), whole_pool=True)
    assert one.read()[model_key("second")][1] == "pool"


def test_record_that_redis_lost_is_restored_from_the_last_read() -> None:
    redis = fakeredis.FakeRedis()
    record = DesiredStateRecord(redis, "p", "one")
    record.write(model_key("second"), Override(model=SECOND), whole_pool=True)
    known = record.read()
    redis.flushall()
    assert record.read() == known
    assert DesiredStateRecord(redis, "p", "two").read() == known


def test_invalid_entries_are_ignored_and_outdated_notes_are_removed() -> None:
    redis = fakeredis.FakeRedis()
    now = time.time()
    fields: dict[Any, Any] = {
        b"x": "y",
        b"[" * 9999: "x",
        field_of(model_key("deep")): "[" * 9999,
        field_of(model_key("of_tomorrow")): '{"at":1,"model":{"id":"of_tomorrow","source":1}}',
        field_of(model_key("old")): Override(at=now - RECORD_TTL_S - 60, gone=True).text(),
        field_of(model_key("new")): Override(at=now, gone=True).text(),
    }
    redis.hset(POOL, mapping=fields)
    assert [*DesiredStateRecord(redis, "p", "one").read()] == [model_key("new")]
    assert not redis.hexists(POOL, field_of(model_key("old")).decode())


def test_adapter_entries_are_removed_with_their_model() -> None:
    record = DesiredStateRecord(fakeredis.FakeRedis(), "p", "one")
    record.write(model_key("second"), Override(model=SECOND), whole_pool=True)
    record.write(adapter_key("second", "pirate"), Override(adapter=PIRATE), whole_pool=True)
    record.read()
    record.write(model_key("second"), GONE, whole_pool=True)
    assert [*record.read()] == [model_key("second")]


def test_model_load_is_refused_after_it_repeatedly_crashed_the_process() -> None:
    redis = fakeredis.FakeRedis()
    key = model_key("second")
    for _ in range(MAX_CRASHED_LOADS):
        DesiredStateRecord(redis, "p", "one").start_load(key)
    record = DesiredStateRecord(redis, "p", "one")
    with pytest.raises(ModelLoadFailed, match=r"crashed the worker"):
        record.start_load(key)
    DesiredStateRecord(redis, "p", "two").start_load(key)  # loads are counted per worker
    record.end_load(key)
    record.start_load(key)
