"""What a wheel must hold so that type checkers see types (PEP 561), and what it says of itself."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import cellama.api

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_tells_that_it_is_typed() -> None:
    for package, folder in SETUPTOOLS["package-dir"].items():
        assert (ROOT / folder / "py.typed").is_file(), package
        assert "py.typed" in SETUPTOOLS["package-data"][package]


def test_version_is_that_of_the_package() -> None:
    assert cellama.api.__version__ == version("cellama")
