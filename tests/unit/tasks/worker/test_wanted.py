"""What a worker shall have: its settings, what was said for its pool, what was said for it alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cellama.config import ModelSettings, Settings
from cellama.config.settings import AdapterSettings
from cellama.tasks.worker.wanted import (
    DEFAULT_KEY,
    Said,
    Spoken,
    Step,
    adapter_key,
    key_of,
    model_key,
    said_of,
    steps,
    wanted_by,
)

PIRATE = AdapterSettings(source="pirate.gguf", scale=0.5)
FIRST = ModelSettings(id="first", source="first.gguf", adapters={"own": {"source": "own.gguf"}})
SECOND = ModelSettings(id="second", source="second.gguf", n_parallel=2)
SETTINGS = Settings(models=(FIRST,))
GONE = Said(gone=True)


def models(spoken: Spoken) -> dict[str, tuple[str, str]]:
    return {id_: (model.source, by) for id_, (model, by) in wanted_by(SETTINGS, spoken).models.items()}


def test_settings_count_until_something_is_said() -> None:
    assert models(Spoken()) == {"first": ("first.gguf", "settings")}
    assert models(Spoken(pool={model_key("first"): Said()})) == {"first": ("first.gguf", "settings")}


def test_worker_counts_more_than_its_pool_and_its_pool_more_than_the_settings() -> None:
    pool = {model_key("second"): Said(model=SECOND), model_key("first"): GONE}
    assert models(Spoken(pool)) == {"second": ("second.gguf", "pool")}
    assert models(Spoken(pool, {model_key("second"): GONE})) == {}
    assert models(Spoken(pool, {model_key("second"): Said()})) == {"second": ("second.gguf", "pool")}


def test_model_of_the_settings_is_replaced_only_after_it_was_unloaded() -> None:
    other = FIRST.model_copy(update={"source": "other.gguf"})
    wanted = wanted_by(SETTINGS, Spoken({model_key("first"): Said(model=other)}))
    assert (wanted.models["first"][0].source, [*wanted.clashes]) == ("first.gguf", ["first"])
    assert models(Spoken({model_key("first"): Said(model=other, over=True)})) == {"first": ("other.gguf", "pool")}


def test_adapters_and_default_are_those_of_models_that_are_wanted() -> None:
    pool = {
        model_key("second"): Said(model=SECOND),
        adapter_key("second", "pirate"): Said(adapter=PIRATE),
        adapter_key("first", "own"): GONE,
        adapter_key("nowhere", "pirate"): Said(adapter=PIRATE),
        DEFAULT_KEY: Said(default="second"),
    }
    wanted = wanted_by(SETTINGS, Spoken(pool))
    assert {key: by for key, (_, by) in wanted.adapters.items()} == {adapter_key("second", "pirate"): "pool"}
    assert [model.adapters for model, _ in wanted.models.values()] == [{}, {"pirate": PIRATE}]
    assert wanted.default == "second"
    assert wanted_by(SETTINGS, Spoken({DEFAULT_KEY: Said(default="nowhere")})).default is None


def test_steps_lead_to_what_is_wanted_and_unload_first() -> None:
    pool = {
        model_key("second"): Said(model=SECOND),
        adapter_key("first", "pirate"): Said(adapter=PIRATE),
        adapter_key("first", "own"): Said(adapter=AdapterSettings(source="own.gguf", scale=0.1)),
    }
    wanted = wanted_by(SETTINGS, Spoken(pool))
    old = SECOND.model_copy(update={"n_parallel": 4})
    loaded = {"first": FIRST, "second": old, "third": SECOND}
    adapters = {adapter_key("first", "own"): FIRST.adapters["own"], adapter_key("first", "left"): PIRATE}
    assert list(steps(wanted, loaded, adapters)) == [
        Step("unload", model_key("second")),
        Step("unload", model_key("third")),
        Step("scale", adapter_key("first", "own")),
        Step("unload", adapter_key("first", "left")),
        Step("load", adapter_key("first", "pirate")),
    ]
    there = {"first": FIRST, "second": wanted.models["second"][0]}
    assert list(steps(wanted, there, {key: adapter for key, (adapter, _) in wanted.adapters.items()})) == []


@pytest.mark.parametrize("model", [SECOND, SECOND.model_copy(update={"hub_token": "hidden", "default": True})])
def test_said_is_read_as_it_was_written_without_secrets(model: ModelSettings) -> None:
    text = '{"at":1.5,' + Said(model=model, over=True).text()[1:]
    assert "hidden" not in text
    assert said_of(model_key("second"), text) == Said(at=1.5, over=True, model=SECOND)


@pytest.mark.parametrize(
    "field", [b"", b"model", b"{}", b"[]", b'["model"]', b'["thing","x"]', b'["model",1]', b"\xff"]
)
def test_field_that_names_nothing_is_refused(field: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        key_of(field)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        {"at": 1, "model": {"id": "other", "source": "x"}},
        {"at": 1, "model": {"id": "second"}},
        {"at": 1, "model": {"id": "second", "source": "x", "n_of_tomorrow": 1}},
        {"at": 1, "gone": True, "model": {"id": "second", "source": "x"}},
        {"at": 1, "adapter": {"source": "x"}},
        {"at": 1, "default": "second"},
        {"at": "now", "gone": True},
    ],
)
def test_value_that_says_nothing_of_its_key_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        said_of(model_key("second"), json.dumps(value))
