#!/usr/bin/env python3
"""Generate code from the modules in tasks/contract/kinds, from `ModelSettings` and from engine/snapshots.py.

The table of kinds is in `tasks/contract/all_kinds.py`. The typed tasks for type checkers are in `tasks/typed_tasks.py`,
and `cellama.tasks` and `cellama.api` export their names. The options of a model are in `config/model_options.py`, and
the JSON types of snapshots are in `tasks/contract/shapes/snapshots.py`.

With `--check`, the script writes nothing, and fails if a file would change.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
# `cellama.tasks` imports files that this script writes. They may not match the kinds, so only the contract is imported.
# Of the engine, only the snapshots are imported.
for package_name in ("tasks", "engine"):
    sys.modules[f"cellama.{package_name}"] = types.ModuleType(f"cellama.{package_name}")
    sys.modules[f"cellama.{package_name}"].__path__ = [str(ROOT / package_name)]

from cellama.config.settings import AdapterSettings, AutoInt, CacheType, Capability, ModelSettings  # noqa: E402
from cellama.engine import snapshots  # noqa: E402
from cellama.tasks.contract import kinds as package  # noqa: E402
from cellama.tasks.contract.kinds import Kind  # noqa: E402
from cellama.tasks.contract.payloads import Payload, TypedAs  # noqa: E402

HEADER = '''"""The tasks for type checkers: the parameters of a call, and the result of its job.

.ci/typed_tasks.py writes this file from the modules in tasks/contract/kinds. Do not edit it; run the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, Unpack

from typing_extensions import TypedDict

from .calls.task_types import QueuedJob, TypedTask
from .contract.shapes.parameters import (
    ExtraFile,
    JsonObject,
    Messages,
    Prediction,
    Prompt,
    Texts,
    TextsOrTokens,
    Tool,
    ToolChoice,
)
'''

OPTIONS_HEADER = '''"""The options of a model, for type checkers.

.ci/typed_tasks.py writes this file from `ModelSettings`. Do not edit it; run the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from typing_extensions import TypedDict

from .settings import CacheType, Capability


class ModelOptions(TypedDict, total=False):
    """All settings of a model except `id`, `source` and `default`. If a value is None, cellama chooses it."""
'''

SNAPSHOTS_HEADER = '''"""The snapshots of engines, embedders and models, as JSON objects.

.ci/typed_tasks.py writes this file from engine/snapshots.py, which explains the fields. Do not edit it; run the script.
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict
'''

ALL_HEADER = '''"""All kinds of jobs, and the union of their results.

.ci/typed_tasks.py writes this file from the modules in tasks/contract/kinds. Do not edit it; run the script.
"""

from __future__ import annotations

from .kinds import Kind
'''


def main() -> int:
    every = dict(found_kinds())
    kinds = [kind for kind in every.values() if kind.is_public]
    shapes = [f"{base_name(kind.payload)}{suffix}" for kind in kinds for suffix in ("Params", "Result")]
    types_of_tasks, tasks = [f"{base_name(kind.payload)}Task" for kind in kinds], list(map(short, kinds))
    texts = {
        ROOT / "tasks/contract/all_kinds.py": all_kinds(every),
        ROOT / "config/model_options.py": model_options(),
        ROOT / "tasks/contract/shapes/snapshots.py": snapshot_shapes(),
        ROOT / "tasks/typed_tasks.py": "\n\n".join([HEADER, *parts(kinds), all_of([*shapes, *types_of_tasks, *tasks])]),
        ROOT / "tasks/__init__.py": exporting(ROOT / "tasks/__init__.py", ".typed_tasks", [*shapes, *tasks]),
        ROOT / "api/__init__.py": exporting(ROOT / "api/__init__.py", "cellama.tasks.typed_tasks", shapes),
    }
    status = 0
    for file, text in texts.items():
        text = formatted(file, text)
        if "--check" not in sys.argv:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            print(f"{file.relative_to(ROOT)} does not match the code; run .ci/typed_tasks.py")
            status = 1
    return status


def found_kinds() -> Iterator[tuple[str, Kind]]:
    """Return all kinds of jobs that the package's modules define, by name."""
    for found in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{found.name}")
        yield from ((name, thing) for name, thing in vars(module).items() if isinstance(thing, Kind))


def all_kinds(kinds: dict[str, Kind]) -> str:
    results = [kind.result.__name__ for kind in kinds.values()]
    imports = [f"from .kinds.{module_of(kind)} import {name}, {kind.result.__name__}" for name, kind in kinds.items()]
    table = f"KINDS: dict[str, Kind] = {{kind.task: kind for kind in ({', '.join(kinds)})}}"
    return "\n".join([ALL_HEADER, *imports, "", table, f"Result = ({' | '.join(results)})"])


def model_options() -> str:
    """Return the source of `ModelOptions`, with a field for each option of `ModelSettings`."""
    types_of_options = get_type_hints(ModelSettings, include_extras=True)
    options = [name for name in ModelSettings.model_fields if name not in ("id", "source", "default")]
    return "\n".join([OPTIONS_HEADER, *(f"    {name}: {option_type(types_of_options[name])}" for name in options)])


def option_type(annotation: Any) -> str:
    """Return the type that callers may pass for an option, as source text."""
    origin, inner = get_origin(annotation), get_args(annotation)
    for alias, text in (
        (AutoInt, 'int | Literal["auto"] | None'),
        (CacheType, "CacheType"),
        (Capability, "Capability"),
    ):
        if annotation == alias:
            return text
    if origin is Annotated:
        return option_type(inner[0])
    if origin in (Union, types.UnionType):
        return " | ".join(map(option_type, inner))
    if origin is tuple:
        return f"Sequence[{option_type(inner[0])}]"
    if origin is dict:
        return f"Mapping[str, {option_type(inner[1])}]"
    if annotation is AdapterSettings:
        return "str | Mapping[str, object]"
    return "object" if annotation is JsonValue else source(annotation)


def snapshot_shapes() -> str:
    """Return the source of a TypedDict for each class of snapshots that workers report."""
    shapes = {
        "DraftTotals": snapshots.SourceDrafts,
        "EngineState": snapshots.EngineSnapshot,
        "EmbedderState": snapshots.EmbedderSnapshot,
        "Totals": snapshots.ManagerSnapshot,
    }
    parts = [SNAPSHOTS_HEADER, f"Phase = {source(snapshots.Phase)}"]
    for shape, snapshot in shapes.items():
        hints = get_type_hints(snapshot)
        summary = (snapshot.__doc__ or "").split("\n\n")[0].split(". ")[0].rstrip(".")
        lines = [f"    {each.name}: {snapshot_type(hints[each.name])}" for each in dataclasses.fields(snapshot)]
        parts.append("\n".join([f"class {shape}(TypedDict):", f'    """{summary}."""', "", *lines]))
    return "\n\n".join(parts)


def snapshot_type(annotation: Any) -> str:
    """Return the type of a snapshot's field, as source text."""
    if annotation == snapshots.Phase:
        return "Phase"
    if get_origin(annotation) is Mapping:
        return "dict[str, DraftTotals]"
    return source(annotation)


def module_of(kind: Kind) -> str:
    return kind.result.__module__.rpartition(".")[2]


def exporting(file: Path, module: str, names: Iterable[str]) -> str:
    """Return the source of a module that imports exactly these names from `module` and lists them in `__all__`."""
    text = file.read_text()
    block = re.compile(rf"^from {re.escape(module)} import (?:\([^)]*\)|.*)$", re.MULTILINE)
    found = block.search(text)
    assert found is not None, f"{file} imports nothing from {module}"
    before = set(re.findall(r"\w+", found[0].partition(" import ")[2]))
    text = text.replace(found[0], f"from {module} import {', '.join(names)}")
    head, assignment, listed = text.partition("__all__ = [")
    kept = set(re.findall(r'"(\w+)"', listed)) - before
    return f"{head}{assignment}{', '.join(f'{chr(34)}{name}{chr(34)}' for name in sorted({*kept, *names}))}]"


def all_of(names: Iterable[str]) -> str:
    return "__all__ = [" + ", ".join(f'"{name}"' for name in sorted(names)) + "]"


def parts(kinds: list[Kind]) -> Iterator[str]:
    yield "\n".join(f"from .contract.kinds.{module_of(kind)} import {kind.result.__name__}" for kind in kinds)
    yield "from .jobs import TASKS"
    written: set[type] = set()
    for kind in kinds:
        for payload in reversed(kind.payload.__mro__):
            if payload not in written and issubclass(payload, Payload) and payload is not Payload:
                written.add(payload)
                yield parameters(payload, kind)
        yield call(kind)
    yield "\n".join(f'{short(kind)}: {base_name(kind.payload)}Task = TASKS["{kind.task}"]' for kind in kinds)


def short(kind: Kind) -> str:
    return kind.task.rpartition(".")[2]


def base_name(payload: type) -> str:
    """Return the name of a payload without its suffix, such as `Embed` for EmbedJob."""
    return payload.__name__.removesuffix("Job")


def parameters(payload: type[BaseModel], kind: Kind) -> str:
    """Return the source of a TypedDict with the parameters that a payload adds to those of its base classes.

    Positional parameters are omitted.
    """
    bases = [f"{base_name(base)}Params" for base in payload.__bases__ if base is not Payload] or ["TypedDict"]
    own = [name for name in inspect.get_annotations(payload) if name not in kind.positional]
    lines = [f"    {name}: {typed(payload.model_fields[name])}" for name in own]
    summary = f"Parameters of `{short(kind)}`." if payload is kind.payload else (payload.__doc__ or "").strip()
    head = f"class {base_name(payload)}Params({', '.join(bases)}, total=False):"
    return "\n".join([head, f'    """{summary}"""', "", *lines])


def call(kind: Kind) -> str:
    """Return the source of a task's typed call with all its parameters, and the source of the task itself."""
    name, fields = base_name(kind.payload), kind.payload.model_fields
    by_name = [f"    {each}: {typed(fields[each])}" for each in kind.positional]
    signature = [
        f"{each}: {typed(fields[each])}" + ("" if fields[each].is_required() else " = None") for each in kind.positional
    ]
    return "\n".join(
        [
            f"class {name}Call({name}Params, total=False):",
            f'    """A call of `{short(kind)}` with all parameters by name."""',
            "",
            *by_name,
            "",
            "",
            f"class {name}Task(TypedTask[{name}Call | {name}Params, {kind.result.__name__}], Protocol):",
            f'    """{(kind.payload.__doc__ or "").strip()}"""',
            "",
            f"    def delay(self, {', '.join(signature)}, **params: Unpack[{name}Params])"
            f" -> QueuedJob[{kind.result.__name__}]: ...",
        ]
    )


def typed(field: FieldInfo) -> str:
    """Return the type of a field for callers, as source text."""
    own = [each.text for each in field.metadata if isinstance(each, TypedAs)]
    return own[-1] if own else source(field.annotation)


def source(annotation: Any) -> str:
    """Return a type as source text. Raises TypeError for a type that needs TypedAs."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        own = [each.text for each in inner[1:] if isinstance(each, TypedAs)]
        return own[-1] if own else source(inner[0])
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(source(one) for one in inner))
    if origin is Literal:
        return "Literal[" + ", ".join(f'"{value}"' for value in inner) + "]"
    if origin is list:
        return f"list[{source(inner[0])}]"
    if origin is tuple and inner[1:] == (Ellipsis,):
        return f"Sequence[{source(inner[0])}]"
    if annotation is type(None):
        return "None"
    if annotation in (str, int, float, bool):
        return str(annotation.__name__)
    raise TypeError(f"{annotation!r} has no type that callers can use; annotate the field with TypedAs")


def formatted(file: Path, text: str) -> str:
    ruff = Path(sys.executable).parent / "ruff"
    for command in (["check", "--quiet", "--fix-only", "--select=F401,I,RUF022"], ["format"]):
        argv = [ruff, *command, "--stdin-filename", str(file), "-"]
        text = subprocess.run(argv, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


if __name__ == "__main__":
    sys.exit(main())
