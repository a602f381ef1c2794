"""The options of a model's engine: its own, and what the worker's settings say of all."""

from __future__ import annotations

from typing import Any

import pytest

from cellama.config import ModelSettings, Settings
from cellama.tasks.worker.model_options import options_of


@pytest.mark.parametrize(
    ("own", "folder", "quota"),
    [
        ({}, "/all", 7),
        ({"cache_dir": "/own"}, "/own", 7),
        ({"cache_disk_bytes": 0}, "/all", 0),  # this model keeps none
        ({"cache_dir": "/own", "cache_disk_bytes": 9}, "/own", 9),
    ],
)
def test_model_has_the_folder_of_its_worker_or_its_own(own: dict[str, Any], folder: str, quota: int) -> None:
    model = ModelSettings(id="m", source="bundled://tiny", **own)
    options = options_of(model, Settings(cache_dir="/all", cache_disk_bytes=7, models=(model,)))
    assert (options.cache_dir, options.cache_disk_bytes) == (folder, quota)
    assert options_of(model, Settings(models=(model,))).cache_dir == own.get("cache_dir")
