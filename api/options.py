"""Generation parameters as command-line options, taken from the payload model: one place says what exists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from cellama.tasks.contract.payloads import GenerateJob

_NOT_OPTIONS = {"model", "prompt", "stream", "n"}
_FROM_FILE = {"grammar", "json_schema"}
_SINGULAR = {"adapters": "adapter"}  # options that are given once per entry


def with_generation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds one option per generation parameter; the command gets those that were given as `params`."""
    fields = {name: field for name, field in GenerateJob.model_fields.items() if name not in _NOT_OPTIONS}

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
    """The value of an option, or the text of the file that it names."""
    if name not in _FROM_FILE or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{value!r}: the file can't be read: {error}", param_hint=_flag(name)) from None


def _flag(name: str) -> str:
    return f"--{_SINGULAR.get(name, name).replace('_', '-')}"


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    text = (field.description or name.replace("_", " ")) + _default_text(field.default)
    flags = f"{_flag(name)}/--no-{_flag(name)[2:]}" if field.default is True else _flag(name)
    option = typer.Option(flags, help=text, show_default=False, rich_help_panel="Generation")
    annotation: Any = Annotated[(_kind(field) | None, option)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default_text(default: Any) -> str:
    if default in (None, (), "") or isinstance(default, bool):
        return ""
    return f" (default: {default:g})" if isinstance(default, int | float) else f" (default: {default!r})"


def _kind(field: FieldInfo) -> Any:
    """What typer parses an option as, from the default and the annotation of the field."""
    names = str(field.annotation)
    if isinstance(field.default, tuple) or "tuple[" in names:
        return list[str]
    if field.default is not None:
        return type(field.default)
    return float if "float" in names else int if "int" in names else str
