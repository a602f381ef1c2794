"""Format `--help` as plain text with a section for each option group. Names are never cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

ARGUMENTS, OPTIONS = "Arguments", "Options"  # default sections for parameters


class HelpfulCommand(TyperCommand):
    """A command whose help has a section for each option group."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        for paragraph in cleandoc(self.help or "").split("\n\n"):
            formatter.write_paragraph()
            with formatter.indentation():
                if ":  " in paragraph:  # an example: it stays in one line, so that users can copy it
                    formatter.write(f"{'':{formatter.current_indent}}{paragraph}\n")
                else:
                    formatter.write_text(paragraph)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class LateCommands(Mapping[str, Any]):
    """A group's commands and inner groups. A command is loaded when it is first used."""

    def __init__(self, loaders: Mapping[str, Callable[[], Any]], groups: Mapping[str, Any]) -> None:
        self._loaders = loaders
        self._loaded = dict(groups)
        self._names = [*loaders, *groups]

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._loaders[name]()
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class HelpfulGroup(TyperGroup):
    """A command group whose help shows the whole first paragraph of each command's help."""

    loaders: Mapping[str, Callable[[], Any]] = {}

    def __init__(self, *, commands: Any = None, **settings: Any) -> None:
        super().__init__(commands=LateCommands(self.loaders, commands), **settings)  # type: ignore[arg-type]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, _first_paragraph(command)) for name, command in commands if command and not command.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def group_of_commands(loaders: Mapping[str, Callable[[], Any]], **settings: Any) -> typer.Typer:
    """Return a group of the commands that `loaders` return, keyed by their names.

    The help is plain text, because Rich cuts off names that are longer than a column.
    """
    group = type("HelpfulGroup", (HelpfulGroup,), {"loaders": loaders})
    return typer.Typer(cls=group, rich_markup_mode=None, no_args_is_help=True, **settings)


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OPTIONS: []}
    for parameter in command.get_params(ctx):
        if (row := parameter.get_help_record(ctx)) is not None:
            default = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
            name, text = row
            name = name.replace("<list[str]>", "<str>").replace(" range>", ">")  # the help text contains the range
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append((name, text))
    for name, rows in groups.items():
        if rows:
            with formatter.section(name):
                formatter.write_dl(rows)


def _first_paragraph(command: Any) -> str:
    return " ".join((command.help or "").partition("\n\n")[0].split())
