"""The options of a model's engine come from the model, or from the settings of its worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cellama.config import ModelSettings, Settings, SettingsError, get_settings
from cellama.tasks.worker.model_loading import check_models, options_of


@pytest.mark.parametrize(
    ("own", "folder", "quota"),
    [
        ({}, "/all", 7),
        ({"cache_dir": "/own"}, "/own", 7),
        ({"cache_disk_bytes": 0}, "/all", 0),  # this model has no cache on disk
        ({"cache_dir": "/own", "cache_disk_bytes": 9}, "/own", 9),
    ],
)
def test_options_use_the_cache_dir_of_the_model_or_the_worker(own: dict[str, Any], folder: str, quota: int) -> None:
    model = ModelSettings(id="m", source="bundled://tiny", **own)
    options = options_of(model, Settings(cache_dir="/all", cache_disk_bytes=7, models=(model,)))
    assert (options.cache_dir, options.cache_disk_bytes) == (folder, quota)
    assert options_of(model, Settings(models=(model,))).cache_dir == own.get("cache_dir")


def model(**options: Any) -> str:
    return json.dumps([{"id": "m", "source": "bundled://tiny", **options}])


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("m=/missing.gguf", "models.m.source: '/missing.gguf' does not exist; check the path"),
        ("m=text.gguf", "models.m.source: 'text.gguf' is not a GGUF file"),
        ("m=bundled://tinny", "models.m.source: bundled file 'tinny' does not exist; did you mean 'tiny'"),
        ("m=hf://nowhere", "models.m.source: 'hf://nowhere' does not name a file on the Hub"),
        (model(draft="/no.gguf", speculation="auto"), "models.m.draft: '/no.gguf' does not exist"),
        (model(adapters={"a": "/no.gguf"}), "models.m.adapters.a: '/no.gguf' does not exist"),
        (model(n_parallel=8, n_batch=4), "models.m: n_batch is 4; it must be at least n_parallel (8)"),
    ],
)
def test_check_models_reports_an_invalid_model_before_anything_is_loaded(
    settings_environment: Callable[..., None], tmp_path: Path, models: str, message: str
) -> None:
    (tmp_path / "text.gguf").write_text("I am no model")
    settings_environment(models=models)
    with pytest.raises(SettingsError) as refused:
        check_models(get_settings())
    assert str(refused.value).startswith(message)
