"""Install the wheel alone and run the demo in an empty directory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ..conftest import PATIENCE_S, clean_environment

ROOT = Path(__file__).parents[2]
PACKAGES = ("api", "bench", "config", "engine", "tasks")
CODE = (".py", ".gguf", ".jinja", ".lua", ".typed")
CHECKOUT_ONLY = [  # what is for developing cellama
    *(f"bench/benchmarks/{name}" for name in ("engine", "faults", "service", "structured")),
    "bench/tiny_model",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of earlier builds gets into it."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    argv = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(output), str(source)]
    built = subprocess.run(argv, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(output.glob("cellama-*.whl"))


def test_wheel_contains_every_module_and_data_file(wheel: Path) -> None:
    files = {
        f"cellama/{path.relative_to(ROOT)}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in CODE and "__pycache__" not in path.parts
        if not any(path.is_relative_to(ROOT / folder) for folder in CHECKOUT_ONLY)
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == files


def test_wheel_metadata_describes_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    for field in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", "Framework :: Celery", "# cellama"):
        assert field in text
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE))
    assert {"worker", "embedded", "flower", "parquet"} <= extras


def test_user_benchmarks_run_from_the_wheel_and_others_name_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)

    def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", "from cellama.api.cli import main; main()", "bench", *arguments]
        environment = clean_environment(PYTHONPATH=str(site))
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)

    listed = bench()
    for name in ("server_concurrent", "mixed", "offline", "gateway"):
        assert f"  {name}" in listed.stdout
        assert f"usage: cellama bench {name}" in bench(name, "--help").stdout
    assert "  chaos" not in listed.stdout
    refused = bench("chaos")
    assert refused.returncode == 2
    assert "chaos is for developing cellama and is not installed; run it from a checkout" in refused.stderr


def test_demo_runs_from_the_wheel_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    start = "import cellama.api, sys; sys.stderr.write(cellama.api.__file__); from cellama.api.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "demo"],
        cwd=empty,
        env=clean_environment(PYTHONPATH=str(site)),
        capture_output=True,
        timeout=2 * PATIENCE_S,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    [shown] = done.stderr.splitlines()  # no warning
    assert shown.startswith(str(site))
    assert "Once upon a time, there was a little fox named Mia" in done.stdout
    assert "The capital of France is Paris." in done.stdout
    told = re.search(r"(\d+) lines, \d+ tokens in [\d.]+ s: (\d+) tokens per second", done.stdout)
    assert told is not None
    assert int(told[1]) >= 32
    assert int(told[2]) > 0
