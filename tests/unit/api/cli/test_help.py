"""Test the help on narrow terminals, and the completion in real shells."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cellama.api.cli import app
from cellama.api.cli.options import GROUPS

from ....ci_scripts import ci_script
from ....conftest import clean_environment
from ....terminals import Terminal

COMMAND = typer.main.get_command(app)
LEAVES: dict[str, Any] = dict(ci_script("reference").leaves("cellama", COMMAND))
BIN = Path(sys.executable).parent
WITHOUT_OWN_HELP = {"cellama bench"}
GROUPS_OF_COMMANDS = sorted({path.rpartition(" ")[0] for path in LEAVES})


def help_text(path: str, columns: int) -> str:
    argv = [*path.split()[1:], "--help"]
    return (
        CliRunner().invoke(app, argv, prog_name="cellama", env={"COLUMNS": str(columns)}, terminal_width=columns).output
    )


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("path", sorted(LEAVES.keys() - WITHOUT_OWN_HELP))
def test_help_shows_each_option_name_and_example_without_line_breaks(path: str, columns: int) -> None:
    text = help_text(path, columns)
    words = set(re.split(r"[\s,]+", text))
    names = {name for parameter in LEAVES[path].params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert {name for name in names if name.startswith("-")} <= words
    assert not {"<bool>", "<list[str]>", "PydanticUndefined"} & words
    example = next(line for line in text.splitlines() if "Example:" in line)
    assert " ".join(LEAVES[path].help.split()).find(example.split(":  ")[1]) > 0  # whole, in one line


@pytest.mark.parametrize("path", [*GROUPS_OF_COMMANDS, *sorted(LEAVES.keys() - WITHOUT_OWN_HELP)])
def test_help_fits_into_80_columns(path: str) -> None:
    assert [line for line in help_text(path, 80).splitlines() if len(line) > 80] == []


def test_help_shows_the_most_used_options_first() -> None:
    text = help_text("cellama batch run", 80)
    places = [text.index(f"\n{name}:\n") for name in ("Arguments", "Options", *GROUPS)]
    assert places == sorted(places)
    assert text.index("--max-tokens") < text.index("--json-schema") < text.index("--dry-base")


def test_group_help_describes_commands_in_complete_sentences() -> None:
    text = help_text("cellama batch", 80)
    assert "..." not in text.partition("Commands:")[2]
    assert re.search(r"run +Run every row of a file", text)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_has_valid_shell_syntax(shell: str, tmp_path: Path) -> None:
    environment = clean_environment(_CELLAMA_COMPLETE=f"source_{shell}", COLUMNS="80")
    script = subprocess.run([BIN / "cellama"], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert f"_CELLAMA_COMPLETE=complete_{shell}" in script.stdout
    if path := shutil.which(shell):
        checked = subprocess.run([path, "-n"], input=script.stdout, capture_output=True, text=True, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_installed_completion_completes_commands_and_options_in_bash(tmp_path: Path) -> None:
    environment = clean_environment(HOME=str(tmp_path), PATH=f"{BIN}:/usr/bin:/bin", PS1="> ", INPUTRC="/dev/null")
    subprocess.run(
        ["bash", "-c", "cellama --install-completion; exit $?"],
        env=environment, cwd=tmp_path, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with Terminal(["bash", "-i"], folder=tmp_path, environment=environment) as terminal:
        terminal.send("cellama bat\t")
        terminal.wait_for(lambda text: "cellama batch " in text, "the command")
        terminal.send("run --merge-id\t")
        terminal.wait_for(lambda text: "--merge-identical " in text, "the option")
        terminal.send("--dry-allow\t")
        terminal.wait_for(lambda text: "--dry-allowed-length " in text, "the option")
