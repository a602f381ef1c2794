"""Test producers with the oldest and the newest libraries that the base package accepts: `make producers`.

Each environment gets the wheel of this working tree, and sends its jobs (producer.py) to one worker, which runs in the
environment of the tests. Prints a table of the resolved versions. Arguments are names of environments, default all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cellama.api.machine.redis_server import RedisServer, free_port  # noqa: E402
from tests.conftest import WorkerProcess, clean_environment, end_process  # noqa: E402

FOLDER = ROOT / "build" / "producers"
PRODUCER = Path(__file__).with_name("producer.py")
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 600, 300
NO_VERSION_CHECK = ("--disable-pip-version-check",)
SHOWN = ("celery", "kombu", "redis", "hiredis", "pydantic")
FRAMEWORKS = ("django", "django-redis", "django-celery-beat", "channels-redis", "fastapi", "starlette")
DJANGO = ("django-redis", "django-celery-beat", "channels-redis")


@dataclass(frozen=True)
class Environment:
    """A producer's virtual environment.

    If its Python is not in PATH, it gets the Python of the tests, or is skipped if `needs_this_python` is set.
    """

    python: str
    packages: tuple[str, ...] = ()
    needs_this_python: bool = False


def oldest() -> tuple[str, ...]:
    """Return the lowest version that the base package accepts of each of its dependencies."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return tuple(line.partition(",")[0].replace(">=", "==") for line in lines)


ENVIRONMENTS = {
    "oldest": Environment("3.11", oldest()),
    "celery-5.5": Environment("3.12", ("celery==5.5.*", "redis==5.2.*")),
    "celery-5.6": Environment("3.13", ("celery==5.6.*", "kombu==5.6.*", "redis==6.4.*")),
    "newest": Environment("3.13"),
    "python-3.14": Environment("3.14", needs_this_python=True),
    "django-5.2": Environment("3.11", ("django==5.2.*", *DJANGO)),
    "django-6": Environment("3.12", ("django==6.*", *DJANGO), needs_this_python=True),
    "fastapi-0.122": Environment("3.11", ("fastapi==0.122.0", "httpx==0.28.*")),
    "fastapi": Environment("3.13", ("fastapi", "httpx==0.28.*")),
}


def install(name: str, wheel: Path) -> str | None:
    """Make the environment. Return None, or why this failed."""
    environment = ENVIRONMENTS[name]
    interpreter = shutil.which(f"python{environment.python}")
    if interpreter is None or subprocess.run([interpreter, "-V"], capture_output=True, check=False).returncode:
        if environment.needs_this_python:
            return f"skipped: no python{environment.python} in PATH"
        interpreter = sys.executable
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", FOLDER / name], check=True)
    command = [python_of(name), "-m", "pip", "install", "--quiet", *NO_VERSION_CHECK, str(wheel), *environment.packages]
    log = FOLDER / f"{name}.log"
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=file, timeout=INSTALL_TIMEOUT_S, check=False)
    return None if done.returncode == 0 else f"failed: pip, see {log.relative_to(ROOT)}"


def python_of(name: str) -> str:
    return str(FOLDER / name / "bin" / "python")


def run(name: str, redis_url: str) -> str:
    """Run the checks in the environment, and return their outcome."""
    log = FOLDER / f"{name}.log"
    environment = clean_environment(CELLAMA_REDIS_URL=redis_url, PYTHONDONTWRITEBYTECODE="1")
    environment.pop("PYTHONPATH", None)
    command = [python_of(name), str(PRODUCER)]
    with log.open("a") as file, tempfile.TemporaryDirectory() as folder:
        users = subprocess.Popen([*command, "worker"], cwd=folder, env=environment, stdout=file, stderr=file)
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=file, stderr=file, timeout=RUN_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"failed: longer than {RUN_TIMEOUT_S} s, see {log.relative_to(ROOT)}"
        finally:
            end_process(users)
    lines = log.read_text().splitlines()
    num_passed = sum(": passed in " in line for line in lines)
    failed = [line.partition(":")[0] for line in lines if line.endswith(": failed")]
    if done.returncode or failed or not num_passed:
        return f"failed: {', '.join(failed) or 'it did not start'}, see {log.relative_to(ROOT)}"
    return f"passed ({num_passed} checks)"


def versions(name: str) -> dict[str, str]:
    """Return the versions of all packages of an environment, by the name in lower case."""
    command = [python_of(name), "-m", "pip", "list", "--format", "freeze", *NO_VERSION_CHECK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    pairs = (line.partition("==") for line in done.stdout.splitlines())
    return {package.lower().replace("_", "-"): version for package, _, version in pairs}


def row(name: str, outcome: str) -> str:
    found = versions(name) if (FOLDER / name).exists() else {}
    frameworks = ", ".join(f"{package} {found[package]}" for package in FRAMEWORKS if package in found)
    python = (
        subprocess.run([python_of(name), "-V"], capture_output=True, text=True, check=False).stdout if found else ""
    )
    cells = [python.removeprefix("Python ").strip() or ENVIRONMENTS[name].python, *(found.get(p, "") for p in SHOWN)]
    return f"| {name} | {' | '.join(cells)} | {frameworks} | {outcome} |"


def build_wheel() -> Path:
    """Return the wheel of this working tree."""
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(FOLDER), str(ROOT)]
    subprocess.run(command, check=True)
    return next(FOLDER.glob("*.whl"))


def main(names: list[str]) -> int:
    FOLDER.mkdir(parents=True, exist_ok=True)
    wheel = build_wheel()
    outcomes: dict[str, str] = {}
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with tempfile.TemporaryDirectory() as folder, RedisServer.start(Path(folder), port=free_port()) as server:
        worker = WorkerProcess(Path(folder), server.url)
        try:
            worker.wait_ready()
            for name in names or ENVIRONMENTS:
                outcomes[name] = install(name, wheel) or run(name, server.url)
                print(f"{name}: {outcomes[name]}", flush=True)
        finally:
            worker.stop()
    print(f"\n| environment | Python | {' | '.join(SHOWN)} | frameworks | result |")
    print(f"|{'---|' * (len(SHOWN) + 4)}")
    for name, outcome in outcomes.items():
        print(row(name, outcome))
    return any(outcome.startswith("failed") for outcome in outcomes.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
