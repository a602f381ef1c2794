"""Generation parameters as command-line options, taken from the payload model: one place says what exists."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from cellama.tasks.contract.payloads import GenerateJob

_NOT_OPTIONS = {"model", "prompt", "stream"}
_TYPES: dict[str, Any] = {"stop": list[str], "ignore_eos": bool}
_FLOATS = {"temperature", "top_p", "min_p", "repeat_penalty", "frequency_penalty", "presence_penalty", "timeout"}


def with_generation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds one option per generation parameter; the command gets those that were given as `params`."""
    fields = {name: field for name, field in GenerateJob.model_fields.items() if name not in _NOT_OPTIONS}

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> None:
        given = {name: kwargs.pop(name) for name in fields}
        command(**kwargs, params={name: value for name, value in given.items() if value not in (None, [])})

    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "params"]
    options = [_option(name, field) for name, field in fields.items()]
    wrapper.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in own + options}
    return wrapper


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = _TYPES.get(name, float if name in _FLOATS else int)
    default = "" if field.default is None or field.default in ((), False) else f" (default: {field.default:g})"
    text = (field.description or name.replace("_", " ")) + default
    option = typer.Option(f"--{name.replace('_', '-')}", help=text, show_default=False, rich_help_panel="Generation")
    annotation: Any = Annotated[(kind | None, option)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
