"""Fixture with a directory of KV states, which engines share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .homes import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "states")
    yield home
    home.close(save=False)
