"""Constrained text through jobs and the command line, and warnings about parts of a schema that are not enforced."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cellama.api import Client
from cellama.api.cli import app
from cellama.tasks.contract.errors import InvalidJob, JobFailed

from ..conftest import PATIENCE_S

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {
            "type": "array",
            "items": {"type": "string", "maxLength": 4},
            "maxItems": 2,
            "uniqueItems": True,  # which no grammar can express
        }
    },
    "required": ["tags"],
    "additionalProperties": False,
}
LENIENT: dict[str, Any] = {"json_schema": SCHEMA, "strict_schema": False, "max_tokens": 60, "temperature": 0}


def check(warnings: list[str]) -> None:
    (warning,) = warnings
    assert "#/properties/tags" in warning
    assert "uniqueItems" in warning


def test_result_and_last_event_list_unenforced_schema_keywords(client: Client) -> None:
    for job in (
        client.generate("tiny", "A", **LENIENT),
        client.chat("tiny", [{"role": "user", "content": "A"}], **LENIENT),
    ):
        (end,) = [event for event in job.stream() if event["type"] == "done"]
        check(end["warnings"])
        result = job.result(PATIENCE_S)
        check(result["warnings"])
        assert json.loads(result["text"]).keys() == {"tags"}


def test_schema_is_strict_unless_the_job_disables_it(client: Client) -> None:
    with pytest.raises(JobFailed, match=r"json_schema at #/properties/tags") as caught:
        client.generate("tiny", "A", json_schema=SCHEMA).result(PATIENCE_S)
    assert caught.value.code == "invalid_request"


def test_text_matches_its_regular_expression_or_grammar(client: Client) -> None:
    for own, whole in (
        ({"regex": "[A-C]{3}[0-9]?"}, "[A-C]{3}[0-9]?"),
        ({"lark": 'start: "a" word+\nword: " " /[a-z]{2}/'}, "a( [a-z]{2})+"),
        ({"grammar": 'root ::= [0-9]{2} "!"'}, "[0-9]{2}!"),
    ):
        result = client.generate("tiny", "A", **own, max_tokens=20, seed=1).result(PATIENCE_S)  # type: ignore[arg-type]
        if result["finish_reason"] == "stop":
            assert re.fullmatch(whole, result["text"])
        assert "warnings" not in result
    for wrong, message in (({"regex": "("}, "regex"), ({"lark": "start: ("}, "lark"), ({"regex": r"(?=a)b"}, "regex")):
        with pytest.raises(JobFailed, match=f"^{message} can't be compiled: ") as caught:
            client.generate("tiny", "A", **wrong).result(PATIENCE_S)  # type: ignore[arg-type]
        assert caught.value.code == "invalid_request"
    with pytest.raises(InvalidJob, match="regex and lark can't be combined; choose one"):
        client.generate("tiny", "A", regex="a", lark="start: /a/")


@pytest.mark.usefixtures("worker")
def test_command_line_writes_warnings_to_stderr_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    argv = ["generate", "tiny", "A", "--json-schema", f"@{tmp_path}/schema.json", "--no-strict-schema"]
    argv += ["--temperature", "0", "--max-tokens", "60"]

    def run(*more: str) -> Any:
        done = CliRunner().invoke(
            app, [*argv, "--temperature", "0", "--max-tokens", "60", *more], env={"COLUMNS": "80"}
        )
        assert done.exit_code == 0, done.output
        return done

    shown = run()
    assert json.loads(shown.stdout).keys() == {"tags"}
    check(re.findall("warning: (.*)", shown.stderr))
    *_, end = map(json.loads, run("--json").stdout.splitlines())
    check(end["warnings"])


@pytest.mark.usefixtures("worker")
def test_command_line_reads_expressions_and_grammars_from_files(tmp_path: Path) -> None:
    for option, text in (("regex", "[A-C]{3}"), ("lark", "start: /[A-C]{3}/")):
        (tmp_path / option).write_text(text)
        argv = ["generate", "tiny", "A", f"--{option}", f"@{tmp_path / option}"]
        done = CliRunner().invoke(app, argv, env={"COLUMNS": "80"})
        assert done.exit_code == 0, done.output
        assert re.fullmatch("[A-C]{3}", done.stdout.strip())
