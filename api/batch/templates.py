"""Insert a row's columns into a template, such as `Summarise: {title}`.

A placeholder contains a column name and never an expression.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any

from cellama.tasks.contract.errors import InvalidJob


class RowTemplate:
    """A string with `{column}` placeholders.

    `{{` and `}}` stand for literal braces. The text between braces is always a column name, so a template can neither
    read attributes nor format values.
    """

    def __init__(self, text: str) -> None:
        """Parse the text. Raises InvalidJob."""
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise InvalidJob(f"template: {error}; write {{{{ or }}}} for a brace") from None
        self._parts: list[tuple[str, str | None]] = []
        for literal, name, spec, conversion in parts:
            # A name may contain a colon or an exclamation mark, which the parser takes for a format.
            if name is not None:
                name += (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            self._parts.append((literal, name))
        self.names = list(dict.fromkeys(name for _, name in self._parts if name is not None))
        if not self.names or "" in self.names:
            raise InvalidJob(f"template: {text!r} has no column; insert columns as {{name}}")

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the text with a row's values inserted. Raises KeyError if the row lacks a column."""
        return "".join(literal + ("" if name is None else text_of(row[name])) for literal, name in self._parts)


def text_of(value: Any) -> str:
    """Return a value as text. Missing values become empty strings, and lists and objects become JSON."""
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
