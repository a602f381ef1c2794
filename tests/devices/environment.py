"""Test models on several devices without a GPU: `make devices`.

llama.cpp's RPC servers appear to llama.cpp as GPUs, and compute on the CPU. The usual build of llama.cpp has no RPC, so
this script builds llama-cpp-python with RPC in `build/devices`, installs the wheel in a virtual environment, and runs
the tests in this directory there. Later runs reuse the wheel and the environment. If llama.cpp can't be built, the
tests are skipped. Arguments are passed to pytest, default all tests in this directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent
FOLDER = ROOT / "build" / "devices"
WHEELS, ENVIRONMENT, LOG = FOLDER / "wheels", FOLDER / "venv", FOLDER / "environment.log"
PYTHON = ENVIRONMENT / "bin" / "python"
INSTALLED = ENVIRONMENT / "installed"  # digest of everything that determines the packages
CONSTRAINTS = ROOT / "constraints.txt"
# The tests don't need the library for images.
CMAKE_ARGS = "-DGGML_RPC=ON -DLLAVA_BUILD=OFF"
EXTRAS = "worker,embedded"
PIP = (str(PYTHON), "-m", "pip", "--disable-pip-version-check")
BUILD_TIMEOUT_S, INSTALL_TIMEOUT_S = 2400, 900  # a build takes about 7 minutes on two free cores


def create() -> str | None:
    """Create the environment, unless it is up to date. Return None, or why the tests must be skipped."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        if INSTALLED.exists() and INSTALLED.read_text() == _digest():
            return None
        LOG.write_text("")
        return _make_venv() or _build_wheel() or _install()


def version() -> str:
    """Return the version of llama-cpp-python in constraints.txt."""
    pinned = re.search(r"^llama-cpp-python==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    assert pinned is not None
    return pinned[1]


def _digest() -> str:
    texts = [CONSTRAINTS.read_text(), (ROOT / "pyproject.toml").read_text(), CMAKE_ARGS, EXTRAS, sys.version]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _make_venv() -> str | None:
    failed = _run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], "venv", INSTALL_TIMEOUT_S)
    return failed or _run([*PIP, "install", "--quiet", "pip>=25.1"], "pip install", INSTALL_TIMEOUT_S)


def _wheel() -> Path | None:
    """Return the wheel with RPC of the pinned version, or None."""
    return next(WHEELS.glob(f"llama_cpp_python-{version()}-*.whl"), None)


def _build_wheel() -> str | None:
    """Build the wheel, unless it exists. pip's cache must not contain it, because it would replace the usual build."""
    if _wheel() is not None:
        return None
    argv = [*PIP, "wheel", "--quiet", "--no-cache-dir", "--no-deps", "--no-binary", "llama-cpp-python"]
    arguments = f"{os.environ.get('CMAKE_ARGS', '')} {CMAKE_ARGS}"
    return _run(
        [*argv, "--wheel-dir", str(WHEELS), f"llama-cpp-python=={version()}"],
        "building llama.cpp with RPC",
        BUILD_TIMEOUT_S,
        CMAKE_ARGS=arguments,
    )


def _install() -> str | None:
    argv = [*PIP, "install", "--quiet", "-c", str(CONSTRAINTS), str(_wheel()), "-e", f".[{EXTRAS}]", "--group", "dev"]
    failed = _run(argv, "pip install", INSTALL_TIMEOUT_S)
    if failed is None:
        INSTALLED.write_text(_digest())
    return failed


def _run(argv: Sequence[str], step: str, timeout_s: float, **variables: str) -> str | None:
    """Run a command with all of its child processes. Return None, or why the command failed."""
    with LOG.open("a") as log:
        print("$", shlex.join(argv), file=log, flush=True)
        process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, **variables}, stdout=log, stderr=log, process_group=0
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"{step} took longer than {timeout_s:.0f} s, see {LOG.relative_to(ROOT)}"
        finally:
            if process.poll() is None:  # also after Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return None if code == 0 else f"{step} failed, see {LOG.relative_to(ROOT)}"


def main(arguments: Sequence[str]) -> int:
    if reason := create():
        print(f"skipped: {reason}")
        return 0
    has_path = any(Path(argument.partition("::")[0]).exists() for argument in arguments)
    argv = [str(PYTHON), "-m", "pytest", *arguments, *([] if has_path else [str(TESTS)])]
    return subprocess.run(argv, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
