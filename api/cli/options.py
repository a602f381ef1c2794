"""Generation parameters as command-line options, taken from the payload model: one place says what exists."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.generate import GenerateJob
from cellama.tasks.contract.kinds.prefill import PrefillJob

_NOT_OPTIONS = {"model", "prompt", "messages", "stream", "n", "system"}
_FROM_FILE = {"json_schema", "regex", "lark", "grammar", "tools", "template_args", "prediction"}
_JSON = {"tools", "template_args"}
_SINGULAR = {"adapters": "adapter", "allowed_tools": "allowed_tool"}  # options that are given once per entry
SAMPLING = "Sampling"
GROUPS: dict[str, tuple[str, ...]] = {  # of the help, the most used first; options that none has are about sampling
    "Answer": ("max_tokens", "temperature", "stop", "seed", "ignore_eos"),
    "Format of the answer": ("json_schema", "strict_schema", "regex", "lark", "grammar", "grammar_root"),
    "Chat": (
        *("enable_thinking", "thinking_budget"),
        *("tools", "tool_choice", "allowed_tools", "parallel_tool_calls"),
        "template_args",
    ),
    "Queue": ("priority", "timeout"),
    "Context": ("parent_key", "adapters", "cache_prompt", "cache_scope", "prediction"),
    "Result": ("logprobs", "return_tokens"),
    SAMPLING: (),
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_RANK = {name: rank for rank, name in enumerate(_GROUP_OF)}


def with_options(
    job: type[GenerateJob | ChatJob | PrefillJob], *, without: frozenset[str] = frozenset()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add one option to a command for each parameter of a job; the command gets those that were given as `params`."""
    return lambda command: _with_options(job, command, without)


def _with_options(
    job: type[GenerateJob | ChatJob | PrefillJob], command: Callable[..., None], without: frozenset[str]
) -> Callable[..., None]:
    known = {name: field for name, field in job.model_fields.items() if name not in _NOT_OPTIONS | without}
    fields = dict(sorted(known.items(), key=lambda item: _RANK.get(item[0], len(_RANK))))

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in fields}
        params = {name: _read(name, value) for name, value in given.items() if value not in (None, [])}
        command(**kwargs, params=params)

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "params"]
    options = [_option(name, field) for name, field in fields.items()]
    wrapper.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in own + options}
    return wrapper


def _read(name: str, value: Any) -> Any:
    """The value of an option, or what is in the file that it names."""
    if name in _FROM_FILE and value.startswith("@"):
        try:
            value = Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{value!r}: the file can't be read: {error}", param_hint=_flag(name)) from None
    if name not in _JSON:
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise typer.BadParameter(f"it is no JSON: {error}", param_hint=_flag(name)) from None


def _flag(name: str) -> str:
    return f"--{_SINGULAR.get(name, name).replace('_', '-')}"


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    default = None if field.is_required() else field.get_default()
    text = (field.description or name.replace("_", " ")) + _default_text(default)
    two_sided = field.default is True or (field.default is None and _kind(name, field) is bool)
    flags = f"{_flag(name)}/--no-{_flag(name)[2:]}" if two_sided else _flag(name)
    kind = _kind(name, field)
    panel = _GROUP_OF.get(name, SAMPLING)
    metavar = "<str>" if kind == list[str] else None  # given once per value
    option = typer.Option(flags, help=text, metavar=metavar, show_default=False, rich_help_panel=panel)
    annotation: Any = Annotated[(kind | None, option)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default_text(default: Any) -> str:
    if default in (None, (), "") or isinstance(default, bool):
        return ""
    return f" (default: {default:g})" if isinstance(default, int | float) else f" (default: {default!r})"


def _kind(name: str, field: FieldInfo) -> Any:
    """What typer parses an option as, from the default and the annotation of the field."""
    if name in _FROM_FILE:
        return str
    names = str(field.annotation)
    if isinstance(field.default, tuple) or "tuple[" in names:
        return list[str]
    if field.default is not None:
        return type(field.default)
    return next((kind for kind in (float, bool, int) if kind.__name__ in names), str)
