"""The reference pages agree with the code and have all of it; pages that the code names exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml
from pydantic import BaseModel

from cellama.api.cli import app
from cellama.bench.harness.suite import BENCHMARKS
from cellama.config import ModelSettings, Settings
from cellama.engine.grammar.schema.formats import FORMATS
from cellama.engine.grammar.schema.keywords import KEYWORDS
from cellama.tasks.contract.all_kinds import KINDS
from cellama.tasks.contract.codes import CODES
from cellama.tasks.contract.kinds.chunk import TASK_CHUNK
from cellama.tasks.metrics.table import TABLE

from ..ci_scripts import ci_script

ROOT = Path(__file__).parents[2]
TEXTS = (".md", ".py", ".toml", ".yml", ".sh", ".lua")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    """The script that writes the generated parts."""
    return ci_script("reference")


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def test_generated_parts_of_pages_agree_with_the_code(reference: ModuleType) -> None:
    assert reference.update_pages(only_check=True) == []


def test_outdated_page_is_reported(reference: ModuleType) -> None:
    stale = "<!-- generated: codes -->\nold\n<!-- end of generated part -->"
    assert "| `timeout` |" in reference.filled(stale)


@pytest.mark.parametrize("kind", [Settings, ModelSettings], ids=lambda kind: kind.__name__)
def test_settings_page_describes_every_setting(kind: type[BaseModel]) -> None:
    text = page("settings.md")
    for name, field in kind.model_fields.items():
        row = re.search(rf"^\| `{name}` \|.*\| (.*) \|$", text, re.MULTILINE)
        assert row is not None, name
        assert kind is ModelSettings or field.description, f"{name} says nothing of itself"


def test_cli_page_lists_every_command_and_option(reference: ModuleType) -> None:
    text = page("cli.md")
    found = dict(reference.leaves("cellama", typer.main.get_command(app)))
    assert {"cellama up", "cellama batch run", "cellama models adapter load"} <= found.keys()
    for path, command in found.items():
        part = text.partition(f"\n## {path}\n")[2].partition("\n## ")[0]
        assert part, path
        for parameter in command.params:
            assert all(name in part for name in parameter.opts if name.startswith("-")), (path, parameter.name)


def test_parameters_page_lists_the_parameters_of_every_task() -> None:
    text = page("parameters.md")
    for kind in KINDS.values():
        if kind.task != TASK_CHUNK:
            missing = [name for name in kind.payload.model_fields if f"`{name}`" not in text]
            assert not missing, f"{kind.task}: {missing}"


def test_error_page_lists_every_code_and_event_page_lists_every_type() -> None:
    errors, events = page("errors.md"), page("events.md")
    assert all(f"| `{code}` |" in errors for code in CODES)
    assert all(f"| `{kind}` |" in events for kind in ("started", "token", "reasoning", "done", "error"))


def test_python_and_status_pages_are_not_empty() -> None:
    assert "### Client.generate_many" in page("python.md")
    assert "| `slots_total` |" in page("status.md")


def test_metrics_page_lists_every_metric() -> None:
    text = page("metrics.md")
    assert [name for name in TABLE if f"| `{name}` |" not in text] == []


def test_json_schema_page_lists_every_keyword_and_format() -> None:
    text = page("json-schema.md")
    for name, keyword in KEYWORDS.items():
        assert f"| `{name}` | {keyword.strict} | {keyword.lenient} |" in text, name
    assert all(f"- `{name}`" in text for name in FORMATS)


def tracked() -> list[Path]:
    """The texts of the repository, with those that are new."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if name.endswith(TEXTS) and (ROOT / name).exists()]


def test_referenced_pages_exist() -> None:
    for path in tracked():
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|py|sh|png|svg)\b", text):
            assert (ROOT / name).exists() or name == "docs/gguf.md", f"{path.relative_to(ROOT)} names {name}"


def test_links_between_files_resolve() -> None:
    for path in (path for path in tracked() if path.suffix == ".md"):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", re.sub(r"`[^`\n]*`", "", text)):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_tables_start_with_a_header() -> None:
    """Rows after an empty line would be shown as text instead of a table."""
    for path in (path for path in tracked() if path.suffix == ".md"):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for first, second in re.findall(r"\n\n(\|[^\n]*)(?:\n([^\n]*))?", text):
            assert re.fullmatch(r"[|\s:-]+", second), f"{path.relative_to(ROOT)}: {first[:60]}"


def test_benchmarks_page_lists_every_benchmark() -> None:
    text = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    told = {name for row in re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert BENCHMARKS.keys() - told == set()


def test_every_page_is_in_the_navigation() -> None:
    site = yaml.safe_load((ROOT / ".ci" / "mkdocs.yml").read_text(encoding="utf-8"))
    placed = set(re.findall(r"[\w/-]+\.md", json.dumps(site["nav"])))
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert there == placed, "the nav of .ci/mkdocs.yml lists the pages"
