"""Check the packaging: types for type checkers (PEP 561), metadata and dependencies."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

import cellama.api

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

# An extra, and the folders that may import its packages. All other modules need the base dependencies only.
FOLDERS = {
    "worker": ["engine", "tasks/attempt"],
    "http": ["api/http", "tasks/metrics"],
    "files": ["api/http/files", "api/batch"],
    "flower": ["api/machine"],
    "metrics": ["tasks/metrics"],
    "otel": ["tasks/traces", "tasks/worker/traces.py"],
    "parquet": ["api/batch"],
}


def distributions(requirements: list[str]) -> set[str]:
    """The names of the distributions, as package indexes write them."""
    return {canonical(re.split(r"[\[<>=~!; ]", line, maxsplit=1)[0]) for line in requirements}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported_packages(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module).partition(".")[0]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[tuple[str, ...]]]:
    """Each module → for each package that it imports, the distributions that have this package."""
    by_package = packages_distributions()
    own = {"cellama", *sys.stdlib_module_names}
    files = [file for folder in ("api", "config", "engine", "tasks") for file in (ROOT / folder).rglob("*.py")]
    return {
        str(file.relative_to(ROOT)): {
            tuple(sorted(map(canonical, by_package.get(package, [package]))))
            for package in imported_packages(file)
            if package not in own
        }
        for file in files
    }


def test_every_package_is_marked_as_typed() -> None:
    for package, folder in SETUPTOOLS["package-dir"].items():
        assert (ROOT / folder / "py.typed").is_file(), package
        assert "py.typed" in SETUPTOOLS["package-data"][package]


def test_version_equals_the_package_version() -> None:
    assert cellama.api.__version__ == version("cellama")


def test_version_is_defined_only_in_pyproject() -> None:
    own = re.compile(rf"(?<![\d.]){re.escape(PYPROJECT['project']['version'])}(?![\d.])")
    files = [file for folder in ("api", "config", "engine", "tasks") for file in (ROOT / folder).rglob("*.py")]
    files += [ROOT / name for name in ("cellama_main.py", "Dockerfile", "docker-compose.yml", "Makefile", "README.md")]
    assert [str(file.relative_to(ROOT)) for file in files if own.search(file.read_text())] == []


def test_every_imported_package_is_declared_where_it_is_imported(imports: dict[str, set[tuple[str, ...]]]) -> None:
    base = distributions(PYPROJECT["project"]["dependencies"])
    extras = PYPROJECT["project"]["optional-dependencies"]
    undeclared = []
    for file, packages in imports.items():
        names = [
            name
            for name, folders in FOLDERS.items()
            if any(file == each or file.startswith(f"{each}/") for each in folders)
        ]
        declared = base.union(*(distributions(extras[name]) for name in names))
        undeclared += [f"{file}: {' or '.join(package)}" for package in packages if not declared & set(package)]
    assert sorted(undeclared) == []


def test_every_declared_package_is_imported_somewhere(imports: dict[str, set[tuple[str, ...]]]) -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    lines = [*PYPROJECT["project"]["dependencies"], *(line for name in FOLDERS for line in extras[name])]
    used = {name for packages in imports.values() for package in packages for name in package}
    assert distributions(lines) - used == set()


def test_minimum_versions_exclude_releases_with_known_bugs() -> None:
    lines = PYPROJECT["project"]["dependencies"] + PYPROJECT["project"]["optional-dependencies"]["worker"]
    for floor in (
        "redis[hiredis]>=5.2,<9,!=8.0.0",  # 8.0.0 breaks Unix sockets
        "redis>=8.0.1,<9",  # workers
        "jinja2>=3.1.6",  # 3.1.5 and 3.1.6 close ways out of the sandbox: CVE-2024-56326, CVE-2025-27516
        "llama-cpp-python>=0.3.36,<0.3.37",  # each patch release brings another llama.cpp
    ):
        assert any(line.startswith(floor) for line in lines), floor


def test_packages_that_only_the_repository_needs_are_not_extras() -> None:
    groups = PYPROJECT["dependency-groups"]
    assert {"bench", "clients", "dev", "docs"} == set(groups)
    assert not set(groups) & set(PYPROJECT["project"]["optional-dependencies"])
