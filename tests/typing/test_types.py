"""Run mypy on programs that use cellama."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STRICT = ("--strict", "--disallow-any-expr", "--disallow-any-decorated", "--disallow-any-explicit")


@pytest.fixture(scope="module")
def found() -> list[str]:
    """Return mypy's messages for all programs, from one run with the links that `.ci/check` makes."""
    links = ROOT / "build/types/cellama"
    links.mkdir(parents=True, exist_ok=True)
    for name in ("api", "config", "engine", "tasks"):
        if not (links / name).exists():
            (links / name).symlink_to(Path("../../..") / name)
    settings = ("--config-file", str(HERE / "mypy.ini"), "--cache-dir", str(ROOT / "build/types/.mypy_cache_users"))
    programs = [str(HERE / name) for name in ("uses_everything.py", "wrong.py")]
    argv = [sys.executable, "-m", "mypy", *settings, *STRICT, *programs]
    done = subprocess.run(argv, cwd=links.parent, capture_output=True, text=True, timeout=170)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_program_that_uses_the_whole_public_api_contains_no_any_type(found: list[str]) -> None:
    assert [line for line in found if "wrong.py" not in line and not line.startswith("Found ")] == []


def test_type_checker_finds_every_user_mistake(found: list[str]) -> None:
    mistakes = (HERE / "wrong.py").read_text().splitlines()
    places = {
        number
        for number, line in enumerate(mistakes, 1)
        if line.startswith(("client.", "awaited.", "next(", "generate.", "embed."))
    }
    assert places == {int(line.split(":")[1]) for line in found if "wrong.py" in line and ": error:" in line}
