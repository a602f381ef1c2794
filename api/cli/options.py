"""Define shared command-line options, and derive options from job parameters."""

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

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one document per line.")]
WaitOption = Annotated[bool, typer.Option("--wait", help="Queue the job even if no worker serves the model.")]
FairnessKeyOption = Annotated[
    str | None,
    typer.Option(
        help="Tenant that the jobs belong to, such as org/team (default: from --cache-scope or the settings)."
    ),
]
PatienceOption = Annotated[
    float, typer.Option("--patience", help="Timeout in seconds for a running job that produces no output.")
]

_NOT_OPTIONS = {"model", "prompt", "messages", "stream", "n", "system", "input_extra"}
_FROM_FILE = {"json_schema", "regex", "lark", "grammar", "tools", "template_args", "prediction", "chat_template"}
_JSON = {"tools", "template_args"}
_NUMBERS = {"stop_token_ids"}
_SINGULAR = {
    "adapters": "adapter",
    "allowed_tools": "allowed_tool",
    "stop_token_ids": "stop_token_id",
}  # these options are repeated, once per value
SAMPLING = "Sampling"
# Sections of the help, in their order. All parameters that are not listed belong to the section about sampling.
GROUPS: dict[str, tuple[str, ...]] = {
    "Answer": (
        *("max_tokens", "min_tokens", "temperature", "stop", "stop_token_ids", "include_stop_str_in_output"),
        *("seed", "ignore_eos"),
    ),
    "Format of the answer": ("json_schema", "strict_schema", "regex", "lark", "grammar", "grammar_root"),
    "Chat": (
        *("enable_thinking", "thinking_budget"),
        *("tools", "tool_choice", "allowed_tools", "parallel_tool_calls"),
        *("template_args", "chat_template", "add_generation_prompt", "continue_final_message"),
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
    """Return a decorator that adds an option for each job parameter to a command.

    The parameters that the user sets are passed to the command in the dictionary `params`.
    """
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

    parameters = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "params"]
    parameters += [_option(name, field) for name, field in fields.items()]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def _read(name: str, value: Any) -> Any:
    """Return an option's value. If the value starts with "@", read the value from the named file."""
    if name in _FROM_FILE and value.startswith("@"):
        try:
            value = Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(
                f"can't read the file named by {value!r}: {error}", param_hint=_flag(name)
            ) from None
    if name not in _JSON:
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise typer.BadParameter(f"{value!r} is not valid JSON: {error}", param_hint=_flag(name)) from None


def _flag(name: str) -> str:
    return f"--{_SINGULAR.get(name, name).replace('_', '-')}"


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    text = (field.description or name.replace("_", " ")) + _default_text(default)
    two_sided = field.default is True or (field.default is None and _kind(name, field) is bool)
    flags = f"{_flag(name)}/--no-{_flag(name)[2:]}" if two_sided else _flag(name)
    kind = _kind(name, field)
    panel = _GROUP_OF.get(name, SAMPLING)
    metavar = {list[str]: "<str>", list[int]: "<int>"}.get(kind)  # typer would show <list[str]>
    option = typer.Option(flags, help=text, metavar=metavar, show_default=False, rich_help_panel=panel)
    annotation: Any = Annotated[(kind | None, option)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _default_text(default: Any) -> str:
    if default in (None, (), "", {}) or isinstance(default, bool):
        return ""
    return f" (default: {default:g})" if isinstance(default, int | float) else f" (default: {default!r})"


def _kind(name: str, field: FieldInfo) -> Any:
    """Return the typer type for an option, based on the field's default and annotation."""
    if name in _FROM_FILE:
        return str
    if name in _NUMBERS:
        return list[int]
    names = str(field.annotation)
    if isinstance(field.default, tuple) or "tuple[" in names:
        return list[str]
    if field.default is not None:
        return type(field.default)
    return next((kind for kind in (float, bool, int) if kind.__name__ in names), str)
