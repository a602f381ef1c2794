"""Build a release in a scratch clone, compare the contents of its packages, and run the demo from the wheel alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from ..conftest import PATIENCE_S, clean_environment

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PACKAGES = ("api", "bench", "config", "engine", "tasks")
CHECKOUT_ONLY = [  # files that are only used to develop cellama
    *(f"bench/benchmarks/{name}" for name in ("engine", "faults", "service", "structured")),
    "bench/README.md",
    "bench/judges",
    "config/helm",
    "bench/results",
    "bench/tiny_model",
]


def source_files() -> list[str]:
    """Return the files of the working tree that git does not ignore."""
    argv = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(name for name in listed if name and (ROOT / name).is_file())


def packaged_files() -> set[str]:
    """Return the source files that the packages contain."""
    return {
        name
        for name in source_files()
        if name.startswith(tuple(f"{package}/" for package in PACKAGES))
        if not any(PurePosixPath(name).is_relative_to(path) for path in CHECKOUT_ONLY)
    }


def git(clone: Path, *arguments: str) -> str:
    argv = ["git", "-C", str(clone), "-c", "user.name=A", "-c", "user.email=a@example.org", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository whose only commit is the working tree, with a dated version and without tests."""
    clone = tmp_path_factory.mktemp("clone")
    for name in source_files():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    changelog = (clone / "CHANGELOG.md").read_text()
    heading = re.compile(rf"^## \[{re.escape(VERSION)}\].*$", re.MULTILINE)
    (clone / "CHANGELOG.md").write_text(heading.sub(f"## [{VERSION}] - 2000-01-01", changelog))
    (clone / ".ci" / "run").write_text("#!/bin/sh\necho the tests ran\n")
    git(clone, "init", "--quiet", "--initial-branch", "main")
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--message", "A commit")
    return clone


def release(clone: Path, output: Path) -> str:
    """Return the output of a dry run of `.ci/release.py` without the SBOM, which would install all dependencies."""
    argv = [sys.executable, str(clone / ".ci" / "release.py"), "--skip-sbom", "--output", str(output)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def released(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("released")
    shown = release(clone, output)
    assert "the tests ran" in shown
    assert "dry run: no tag was created" in shown
    return output


@pytest.fixture(scope="module")
def wheel(released: Path) -> Path:
    return released / f"cellama-{VERSION}-py3-none-any.whl"


def test_dry_run_writes_packages_notes_and_checksums_without_creating_a_tag(clone: Path, released: Path) -> None:
    files = {str(file.relative_to(released)) for file in released.rglob("*") if file.is_file()}
    packages = {f"cellama-{VERSION}{ending}" for ending in (".tar.gz", "-py3-none-any.whl")}
    assert files == {*packages, "NOTES.md", "SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=released, check=True, capture_output=True)
    assert git(clone, "tag") == ""
    assert git(clone, "status", "--porcelain") == ""


def test_repeated_builds_of_a_commit_are_identical(clone: Path, released: Path, tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        release(clone, tmp_path)
    finally:
        os.umask(umask)
    assert (tmp_path / "SHA256SUMS").read_text() == (released / "SHA256SUMS").read_text()


def test_wheel_contains_exactly_the_files_that_users_need(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {"cellama_main.py", *(f"cellama/{name}" for name in packaged_files())}


def test_sdist_contains_exactly_the_sources_of_the_wheel(released: Path) -> None:
    root = f"cellama-{VERSION}"
    with tarfile.open(released / f"{root}.tar.gz") as archive:
        held = {member.name.removeprefix(f"{root}/") for member in archive if member.isfile()}
    metadata = {"PKG-INFO", "setup.cfg"}
    held = {name for name in held if not name.startswith("cellama.egg-info/")}
    assert held == packaged_files() | metadata | {"LICENSE", "README.md", "cellama_main.py", "pyproject.toml"}


def test_wheel_contains_the_licences_of_cellama_and_all_vendored_code(wheel: Path) -> None:
    files = {PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()}
    assert PurePosixPath(f"cellama-{VERSION}.dist-info/licenses/LICENSE") in files
    vendored = {file.parent for file in files if ".min." in file.name or "vendor" in file.parts}
    licensed = {file.parent for file in files if file.name.startswith("LICENSE")}
    assert vendored <= licensed


def test_wheel_metadata_describes_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    for field in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", "Framework :: Celery", "# cellama"):
        assert field in text
    extras = set(re.findall(r"^Provides-Extra: (\w+)$", text, re.MULTILINE))
    assert {"worker", "embedded", "flower", "parquet"} <= extras


def test_user_benchmarks_run_from_the_wheel_and_other_benchmarks_refer_to_the_repository(
    wheel: Path, tmp_path: Path
) -> None:
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
    assert "chaos is a developer benchmark and is not installed; run it from a source checkout" in refused.stderr


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
