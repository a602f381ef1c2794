"""Build a wheelhouse, install it on a machine without a network, and run the demo there."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ..conftest import PATIENCE_S, clean_environment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "examples" / "wheelhouse" / "build_wheelhouse.py"
# A new network namespace with nothing but the loopback interface
OFFLINE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
INSTALLER_FILES = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}


def _refusal() -> str:
    """Return the reason why this machine can't start a program without a network, or "" if it can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip or unshare is missing"
    return subprocess.run([*OFFLINE, "true"], capture_output=True, text=True).stderr.strip()


def _has_index(folder: Path) -> bool:
    """Return whether pip can download packages."""
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", folder, "mdurl"]
    return subprocess.run(argv, capture_output=True).returncode == 0


def repacked(name: str, folder: Path) -> Path:
    """Return a wheel of an installed package, because building llama.cpp takes minutes."""
    package = importlib.metadata.distribution(name)
    tag = re.search(r"^Tag: (\S+)$", package.read_text("WHEEL") or "", re.MULTILINE)
    assert tag is not None
    wheel = folder / f"{name}-{package.version}-{tag[1]}.whl"
    record = f"{name}-{package.version}.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        files = [file for file in package.files or [] if file.suffix != ".pyc" and file.name not in INSTALLER_FILES]
        for file in files:
            archive.write(str(file.locate()), str(file))
        archive.writestr(record, "".join(f"{file},,\n" for file in [*files, record]))
    return wheel


@pytest.mark.skipif(bool(_refusal()), reason=f"no network namespace here: {_refusal()}")
def test_wheelhouse_installs_and_runs_the_demo_without_a_network(tmp_path: Path) -> None:
    if not _has_index(tmp_path / "index"):
        pytest.skip("pip can't download packages here")
    llama_cpp = repacked("llama_cpp_python", tmp_path)
    built = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "wheels", "--llama-cpp", llama_cpp], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    commands = [line.strip() for line in built.stdout.splitlines() if line.startswith("    ")]
    assert len(commands) == 3

    environment = {**clean_environment(), "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        [*OFFLINE, "sh", "-e", "-c", "\n".join(commands)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The capital of France is Paris." in done.stdout


def test_image_and_install_page_use_the_llama_cpp_build_options_of_the_wheelhouse() -> None:
    found = re.search(r'^ALL_CPUS = "(.+)"$', SCRIPT.read_text(), re.MULTILINE)
    assert found is not None
    image = (ROOT / "Dockerfile").read_text()
    assert [option for option in found[1].split() if option not in image] == []
    assert f'CMAKE_ARGS="{found[1]}"' in (ROOT / "docs" / "how-to" / "install.md").read_text()


def test_wheelhouse_directory_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"directory: {tmp_path} is not empty; choose a new directory\n"
