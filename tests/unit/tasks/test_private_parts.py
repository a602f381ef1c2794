"""The private parts of Celery, kombu and redis-py that cellama uses. A missing or changed part fails here first."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from cellama.tasks.connection import kombu_internals
from cellama.tasks.connection.kombu_internals import (
    ALL_PARTS,
    ATTRIBUTE,
    INHERITED,
    PARTS,
    UnfitLibraries,
    require_parts,
)

ROOT = Path(__file__).parents[3]
TABLES = "tasks/connection/kombu_internals.py"
FILES = sorted(str(file.relative_to(ROOT)) for folder in ("api", "tasks") for file in (ROOT / folder).rglob("*.py"))
FILES.remove(TABLES)


def name_of(path: str) -> str:
    return path.rpartition(".")[2].rpartition(":")[2]


@pytest.mark.parametrize("path", ALL_PARTS)
def test_private_api_has_the_expected_signature(path: str) -> None:
    require_parts(path)


class Owner:
    def __init__(self) -> None:
        self._set_here = 1

    def method(self, given: int) -> None: ...

    @property
    def own(self) -> int:
        return self._set_here


@pytest.mark.parametrize(
    ("name", "expected", "is_there"),
    [
        ("_set_here", ATTRIBUTE, True),
        ("_set_nowhere", ATTRIBUTE, False),
        ("own", ATTRIBUTE, True),
        ("method", "(self, given: ", True),
        ("method", "(self, other", False),
        ("gone", "(self)", False),
    ],
)
def test_missing_or_changed_private_api_is_reported_with_the_installed_versions(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: str, is_there: bool
) -> None:
    path = f"{__name__}:Owner.{name}"
    monkeypatch.setattr(kombu_internals, "ALL_PARTS", {path: expected})
    if is_there:
        require_parts.__wrapped__(path)
        return
    with pytest.raises(UnfitLibraries, match=re.escape(path)) as refused:
        require_parts.__wrapped__(path)
    assert f"celery {version('celery')}, kombu {version('kombu')}, redis {version('redis')}: " in str(refused.value)


def test_package_versions_have_upper_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for needed in (project["dependencies"], project["optional-dependencies"]["worker"]):
        for name in ("celery", "kombu", "redis"):
            assert any(re.match(rf"{name}\b.*<", line) for line in needed), name


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def mentioned(node: ast.AST) -> Iterator[str]:
    """Yield the names of attributes that a tree uses, and the names that it imports."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            inner = any(map(private, (child.module or "").split(".")))
            yield from (f"_{alias.name}" if inner else alias.name for alias in child.names)
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "getattr":
            yield from (arg.value for arg in child.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def defined(node: ast.AST) -> Iterator[str]:
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            if isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
                yield child.attr
        elif isinstance(child, ast.AnnAssign | ast.Assign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize("file", FILES)
def test_private_apis_are_used_only_in_one_file_and_by_listed_subclasses(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    known = {name_of(path) for path in INHERITED.get(file.removeprefix("tasks/"), {})}
    names, own = {name for name in mentioned(tree) if private(name)} - {"_exit"}, set(defined(tree))  # os._exit
    assert names - own <= known, f"{file}: {names - own - known} belongs in tasks/connection/kombu_internals.py"
    assert known <= names | own, f"{file} no longer uses: {known - names - own}"


def test_table_lists_exactly_the_private_apis_that_its_file_uses() -> None:
    used = set(mentioned(ast.parse((ROOT / TABLES).read_text())))
    names = {name_of(path).lstrip("_") for path in PARTS}
    assert names == {name.lstrip("_") for name in used if name.startswith("_") and not name.endswith("__")}
