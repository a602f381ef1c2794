"""Convert the rows of an uploaded table or text file into batch requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from cellama.api.batch.formats import compression_of, format_of
from cellama.api.batch.lines import ID_COLUMNS
from cellama.api.batch.rows import BadInputRow, rows_of
from cellama.api.batch.templates import RowTemplate
from cellama.api.http.errors import ApiError
from cellama.api.openai.parameters import CHAT, COMPLETIONS, EMBEDDINGS
from cellama.config.settings import explain
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.json_values import shorten

MAX_TABLE_BYTES = 32 << 20  # a table with an unclosed quote is a single value, so this limits the memory of a gateway
_SUFFIXES = ".csv, .tsv and .txt"
_CONTENT: Mapping[str, tuple[str, Callable[[str], Any]]] = {  # endpoint → field of the text, and its value
    CHAT: ("messages", lambda text: [{"role": "user", "content": text}]),
    COMPLETIONS: ("prompt", lambda text: text),
    EMBEDDINGS: ("input", lambda text: text),
}


class TableRun(BaseModel):
    """The form fields that describe the requests for a table's rows. Empty fields are omitted."""

    model_config = ConfigDict(extra="ignore")

    model: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"] = "/v1/chat/completions"
    template: str = ""
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str) -> str:
        if not model:
            raise ValueError("the model is empty; choose a model for the rows")
        return model

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> TableRun:
        """Parse a form's fields. Raises ApiError (400)."""
        try:
            return cls.model_validate({"model": "", **{name: text for name, text in fields.items() if text.strip()}})
        except ValidationError as error:
            raise ApiError(400, "; ".join(map(explain, error.errors()))) from None

    def body(self, text: str) -> dict[str, Any]:
        """Return the body of a request whose prompt or input is this text."""
        field, content_of = _CONTENT[self.endpoint]
        content = content_of(text)
        if self.endpoint == CHAT and self.system:
            content = [{"role": "system", "content": self.system}, *content]
        options = (
            {} if self.endpoint == EMBEDDINGS else {"max_tokens": self.max_tokens, "temperature": self.temperature}
        )
        return {
            "model": self.model,
            field: content,
            **{name: value for name, value in options.items() if value is not None},
        }


def is_table(name: str) -> bool:
    """Return whether the file name belongs to a table or text file. All other uploaded files contain JSON lines."""
    return compression_of(Path(name)) == "" and format_of(Path(name), "auto") in ("csv", "tsv", "text")


def write_requests(table: Path, name: str, run: TableRun, target: Path, max_line_bytes: int) -> None:
    """Write one request per table row.

    `name` is the uploaded table's original file name. A row's id is the value of the column `custom_id` or `id`, or the
    row number if the table has neither column. Raises ApiError (400 or 413), and OSError.
    """
    if table.stat().st_size > MAX_TABLE_BYTES:
        raise ApiError(
            413,
            f"file: the table has {table.stat().st_size} bytes, and the limit for {_SUFFIXES} is {MAX_TABLE_BYTES}; "
            "split it, or use `cellama batch run`",
            param="file",
        )
    try:
        with table.open("rb") as stream, target.open("x", encoding="utf-8") as requests:
            template: RowTemplate | None = None
            for row in rows_of(stream, format_of(Path(name), "auto"), max_line_bytes):
                if isinstance(row, BadInputRow):
                    raise ApiError(400, f"file: row {row.number}: {row.message}", param="file")
                template = template or _template_of(run, list(row.values))
                custom_id = next((str(row.values[column]) for column in ID_COLUMNS if column in row.values), row.number)
                request = {"custom_id": str(custom_id), "method": "POST", "url": run.endpoint}
                requests.write(json.dumps({**request, "body": run.body(template.render(row.values))}) + "\n")
            if template is None:
                raise ApiError(400, "file: the table has no rows; check that it is the right file", param="file")
    except InvalidJob as error:
        raise ApiError(400, f"file: {error}", param="file") from None


def _template_of(run: TableRun, columns: list[str]) -> RowTemplate:
    """Return the template for rows with these columns.

    If no template is given, insert the only column other than the id.

    Raises ApiError (400), and InvalidJob if the template can't be parsed.
    """
    others = [column for column in columns if column not in ID_COLUMNS]
    if not run.template and len(others) != 1:
        listed = ", ".join(f"{{{column}}}" for column in columns)
        raise ApiError(
            400,
            f"template is empty; write the request text, using the file's columns: {listed}",
            param="template",
        )
    template = RowTemplate(run.template or f"{{{others[0]}}}")
    for name in template.names:
        if name not in columns:
            known = ", ".join(columns)
            message = f"template: the file has no column {shorten(name)}; its columns are: {known}"
            raise ApiError(400, message, param="template")
    return template
