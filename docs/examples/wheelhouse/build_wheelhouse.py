#!/usr/bin/env python3
"""Build a wheelhouse: a directory with every package that cellama needs on a machine without internet access.

Run this program with the other machine's Python version, on the same operating system and processor architecture:

    python3.11 build_wheelhouse.py wheels --extras worker,embedded,http

The program needs internet access and a C++ compiler, which the other machine doesn't need. Copy the directory to the
other machine, and run the commands that this program prints at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

CELLAMA = Path(__file__).resolve().parents[3]  # the clone of the repository
CONSTRAINTS = CELLAMA / "constraints.txt"
REQUIREMENTS = "requirements.txt"
PACKAGED = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")  # results of earlier builds

# The wheel contains a library for each CPU generation. The worker loads the best library for its CPU.
ALL_CPUS = "-DGGML_NATIVE=off -DGGML_BACKEND_DL=on -DGGML_CPU_ALL_VARIANTS=on -DCMAKE_INSTALL_BINDIR=llama_cpp/lib"
# On processors other than x86-64, these libraries need a newer compiler than some systems provide.
BASELINE = "-DGGML_NATIVE=off"


def main() -> None:
    """Build the wheelhouse, and print the installation commands."""
    options = parse()
    wheels: Path = options.directory
    wheels.mkdir(parents=True, exist_ok=True)
    if any(wheels.iterdir()):
        sys.exit(f"directory: {wheels} is not empty; choose a new directory")

    if options.llama_cpp:
        shutil.copy(options.llama_cpp, wheels)
    else:
        report("Building llama.cpp, which takes some minutes ...")
        build_llama_cpp(wheels, options.cmake_args)
    report("Downloading the other packages ...")
    collect(wheels, options.extras)
    write_requirements(wheels)
    check(wheels)

    files = list(wheels.glob("*.whl"))
    size = sum(file.stat().st_size for file in files) / 1e6
    report(f"{wheels}: {len(files)} wheels, {size:.0f} MB. Copy the directory to the other machine, and run there:\n")
    for line in install_commands(wheels):
        report(f"    {line}")


def parse() -> argparse.Namespace:
    """Parse the command-line options."""
    is_x86 = sys.platform == "linux" and platform.machine() == "x86_64"
    cmake_args = os.environ.get("CMAKE_ARGS", ALL_CPUS if is_x86 else BASELINE)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="directory to create, which must be empty if it exists")
    parser.add_argument("--extras", default="worker,embedded", help="cellama extras to include (default: %(default)s)")
    parser.add_argument(
        "--cmake-args", default=cmake_args, metavar="ARGS", help="CMake arguments for llama.cpp (default: %(default)s)"
    )
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="WHEEL", help="llama-cpp-python wheel to use instead of building a wheel"
    )
    return parser.parse_args()


def report(line: str) -> None:
    print(line, flush=True)


def pip(*arguments: str | Path, **variables: str) -> None:
    """Run pip, and exit the program if pip fails."""
    argv = [sys.executable, "-m", "pip", *map(str, arguments), "--quiet", "--disable-pip-version-check"]
    if subprocess.run(argv, env={**os.environ, **variables}).returncode:
        sys.exit("pip failed; see its output above")


def build_llama_cpp(wheels: Path, cmake_args: str) -> None:
    """Build the llama-cpp-python wheel without pip's cache, because the cache ignores CMAKE_ARGS."""
    name = "llama-cpp-python"
    source = ("--no-cache-dir", "--no-binary", name, "--no-deps")
    pip("wheel", *source, "--constraint", CONSTRAINTS, "--wheel-dir", wheels, name, CMAKE_ARGS=cmake_args)


def collect(wheels: Path, extras: str) -> None:
    """Build the cellama wheel, and download the wheels of all packages that cellama and these extras need."""
    with tempfile.TemporaryDirectory(prefix="cellama-") as folder:
        source = Path(folder) / "cellama"
        shutil.copytree(CELLAMA, source, ignore=PACKAGED)
        places = ("--constraint", CONSTRAINTS, "--find-links", wheels, "--wheel-dir", wheels)
        pip("wheel", *places, f"{source}[{extras}]")


def write_requirements(wheels: Path) -> None:
    """Write a requirements file with the version and the SHA-256 hash of every wheel."""
    (wheels / REQUIREMENTS).write_text("\n".join(requirements(sorted(wheels.glob("*.whl")))) + "\n")


def requirements(files: Iterable[Path]) -> Iterable[str]:
    for file in files:
        name, version = file.name.split("-")[:2]
        yield f"{name}=={version} --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"


def offline(wheels: Path) -> list[str]:
    """Return the pip arguments that install only packages from the wheelhouse."""
    return ["--no-index", "--find-links", str(wheels), "--require-hashes", "-r", str(wheels / REQUIREMENTS)]


def check(wheels: Path) -> None:
    """Check that pip can resolve all requirements from the wheelhouse, without installing them."""
    pip("install", "--dry-run", "--ignore-installed", *offline(wheels))


def install_commands(wheels: Path) -> list[str]:
    """Return the installation commands for the other machine."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    copied = Path(wheels.name)
    return [f"{python} -m venv .venv", f".venv/bin/pip install {' '.join(offline(copied))}", ".venv/bin/cellama demo"]


if __name__ == "__main__":
    main()
