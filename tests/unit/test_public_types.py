"""Public types contain no `Any` and match what workers report."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import fields
from types import ModuleType
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import TypeAdapter

import cellama.api
import cellama.config
import cellama.engine
import cellama.tasks
from cellama.engine import AdapterInfo, Device, ModelInfo
from cellama.engine.memory.budget import MemoryUse
from cellama.engine.models.manager import ModelEntry
from cellama.engine.system.core_sharing import CoreSharing
from cellama.engine.system.processors import Processors
from cellama.tasks.contract.shapes import workers as shapes
from cellama.tasks.state.registry import describe

PUBLIC = [cellama.api, cellama.config, cellama.tasks]
TWINS = [
    (MemoryUse, shapes.DeviceUse),
    (AdapterInfo, shapes.WorkerAdapter),
    (Device, shapes.WorkerDevice),
]


def untyped(kind: Any, path: str, seen: set[Any]) -> Iterator[str]:
    """Where a type has an Any, in its parts, its fields, and what its methods take and give."""
    if kind is Any:
        yield path
    for part in get_args(kind):
        yield from untyped(part, path, seen)
    if not (inspect.isclass(kind) or inspect.isfunction(kind)) or not kind.__module__.startswith("cellama."):
        return
    if kind in seen:
        return
    seen.add(kind)
    for owner in getattr(kind, "__mro__", [kind]):
        if not owner.__module__.startswith("cellama."):
            continue
        own = owner.__dict__ if inspect.isclass(owner) else {}
        named = own.get("__annotations__", {}) if inspect.isclass(owner) else {"return": None, **owner.__annotations__}
        hints = get_type_hints(owner)
        for name in (name for name in named if not name.startswith("_") and name in hints):
            yield from untyped(hints[name], f"{path}.{name}", seen)
        for name, member in own.items():
            method = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(method) and not name.startswith("_"):
                yield from untyped(method, f"{path}.{name}", seen)


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_signatures_contain_no_any(package: ModuleType) -> None:
    variables = get_type_hints(package)
    public = {name: variables.get(name, getattr(package, name)) for name in package.__all__ if name != "app"}
    assert [place for name, thing in public.items() for place in untyped(thing, name, set())] == []


@pytest.mark.parametrize("package", [*PUBLIC, cellama.engine], ids=lambda package: package.__name__)
def test_public_names_and_methods_have_docstrings(package: ModuleType) -> None:
    silent = []
    for name in package.__all__:
        thing = getattr(package, name)
        members = vars(thing).items() if inspect.isclass(thing) else ()
        methods = [(inner, m.fget if isinstance(m, property) else getattr(m, "__func__", m)) for inner, m in members]
        silent += [
            f"{name}.{inner}" for inner, m in methods if inner[0] != "_" and inspect.isfunction(m) and not m.__doc__
        ]
        silent += [name] if (inspect.isclass(thing) or inspect.isfunction(thing)) and not thing.__doc__ else []
    assert silent == []


@pytest.mark.parametrize(("inside", "outside"), TWINS)
def test_worker_report_has_the_same_fields_as_the_engine_report(inside: Any, outside: Any) -> None:
    assert outside.__required_keys__ == {field.name for field in fields(inside)}


def test_loaded_model_type_has_the_same_fields_as_in_the_engine() -> None:
    assert shapes.LoadedModel.__optional_keys__ >= {field.name for field in fields(ModelInfo)}


def test_report_of_a_loading_model_matches_its_type() -> None:
    entry = ModelEntry("tiny", "bundled://tiny", frozenset({"embed"}))
    check(shapes.WorkerModel, describe(entry, default=False))


def test_report_of_worker_cores_matches_its_type() -> None:
    check(shapes.WorkerCores, CoreSharing(list, Processors(2)).report())


def check(kind: Any, value: Any) -> None:
    """Raises ValidationError for a key or a value that the type does not have."""
    TypeAdapter(kind).validate_python(json.loads(json.dumps(value)), strict=True, extra="forbid")
