"""The private parts of Celery, kombu and redis-py that we build on. One that is gone or changed is named here first."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from kombu.utils.imports import symbol_by_name

from cellama.tasks.connection.kombu_internals import ATTRIBUTE, INHERITED, PARTS

ROOT = Path(__file__).parents[3]
TABLES = "tasks/connection/kombu_internals.py"
TABLE = {path: expected for parts in (PARTS, *INHERITED.values()) for path, expected in parts.items()}
FILES = sorted(str(file.relative_to(ROOT)) for folder in ("api", "tasks") for file in (ROOT / folder).rglob("*.py"))
FILES.remove(TABLES)

# What we override, or call in the way Celery does, without an underscore.
OVERRIDDEN = {
    "celery.app.base:Celery.connection_for_write": "(self, url=None, **kwargs)",
    "celery.app.task:Task.apply": (
        "(self, args=None, kwargs=None, link=None, link_error=None, task_id=None, retries=None, throw=None, "
        "logfile=None, loglevel=None, headers=None, **options)"
    ),
    "celery.app.task:Task.signature": "(self, args=None, *starargs, **starkwargs)",
    "celery.concurrency.base:apply_target": "(target, args=(), kwargs=None, callback=None, accept_callback=None, pid=",
    "celery.worker.consumer:Consumer.call_soon_ack": "(self, p, *args, **kwargs)",
    "celery.worker.consumer:Consumer.on_connection_error_after_connected": "(self, exc)",
    "celery.worker.control:revoke": "(state, task_id, terminate=False, signal=None, **kwargs)",
    "celery.worker.request:Request.maybe_expire": "(self)",
    "celery.worker.request:Request.on_timeout": "(self, soft, timeout)",
    "celery.worker.request:Request.terminate": "(self, pool, signal=None)",
    "celery.worker.strategy:default": "(task, app, consumer, ",
    "kombu.transport.redis:Channel._put": "(self, queue, message, **kwargs)",
    "kombu.transport.redis:QoS.can_consume": "(self)",
    "kombu.transport.virtual:QoS.ack": "(self, delivery_tag)",
    "kombu.transport.redis:QoS.restore_unacked": "(self, client=None)",
    "kombu.transport.redis:QoS.restore_visible": "(self, start=0, num=10, interval=10)",
    "kombu.transport.virtual:QoS.append": "(self, message, delivery_tag)",
    "kombu.transport.virtual:QoS.reject": "(self, delivery_tag, requeue=False)",
}


def name_of(path: str) -> str:
    return path.rpartition(".")[2].rpartition(":")[2]


def find(path: str) -> tuple[Any, str]:
    module, _, names = path.partition(":")
    *owners, name = names.split(".")
    owner = symbol_by_name(f"{module}:{owners[0]}") if owners else __import__(module, fromlist=["_"])
    return owner, name


@pytest.mark.parametrize(("path", "expected"), [*TABLE.items(), *OVERRIDDEN.items()])
def test_part_is_there_as_we_know_it(path: str, expected: str) -> None:
    installed = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
    gone = f"{path} is not what cellama builds on any more in {installed}: see tasks/connection/kombu_internals.py"
    owner, name = find(path)
    if expected is not ATTRIBUTE:
        part = getattr(owner, name, None)
        assert part is not None, gone
        assert str(inspect.signature(part)).startswith(expected), gone
    elif not hasattr(owner, name):
        sources = [inspect.getsource(kind) for kind in owner.__mro__ if kind is not object]
        assert any(f"self.{name}" in source for source in sources), gone


def test_versions_have_upper_bounds() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in ("celery", "kombu", "redis"):
        assert any(re.match(rf"{name}\b.*<", line) for line in needed), name


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def mentioned(node: ast.AST) -> Iterator[str]:
    """Private names that are read or set somewhere below as attributes, or imported, also from private modules."""
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
def test_private_parts_are_used_in_one_file_but_for_what_a_subclass_inherits(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    known = {name_of(path) for path in INHERITED.get(file.removeprefix("tasks/"), {})}
    names, own = {name for name in mentioned(tree) if private(name)} - {"_exit"}, set(defined(tree))  # os._exit
    assert names - own <= known, f"{file}: {names - own - known} belongs into tasks/connection/kombu_internals.py"
    assert known <= names | own, f"{file} uses no more: {known - names - own}"


def test_table_has_what_its_file_uses_and_nothing_else() -> None:
    used = set(mentioned(ast.parse((ROOT / TABLES).read_text())))
    names = {name_of(path).lstrip("_") for path in PARTS}
    assert names == {name.lstrip("_") for name in used if name.startswith("_")}
