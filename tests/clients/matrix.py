"""Test other projects' clients, unmodified, with a gateway and a worker: `make clients`.

Each environment is created in `build/clients` with pip or npm, and runs the checks in its script. Environments for
Node.js are skipped if `node` or `npm` is not in PATH. Prints a table with the resolved versions. Arguments are names of
environments, default all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from cellama.api.machine.redis_server import RedisServer, free_port  # noqa: E402
from tests.conftest import WorkerProcess, clean_environment  # noqa: E402
from tests.gateways import GatewayProcess  # noqa: E402

FOLDER = ROOT / "build" / "clients"
SCRIPTS = Path(__file__).parent
INSTALL_TIMEOUT_S, RUN_TIMEOUT_S = 900, 600


@dataclass(frozen=True)
class Environment:
    """Packages of one ecosystem and the script that uses them. The suffix of the script decides between pip and npm."""

    script: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


AI_SDK = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic")
LANGCHAIN_JS = ("langchain", "@langchain/core", "@langchain/openai", "@langchain/anthropic", "zod")
NODE = "node@22"  # the newest major versions need a newer Node.js than Debian 12 and 13 have
ENVIRONMENTS = {
    "openai-2": Environment("openai_client.py", ("openai==2.*",)),
    "openai-3": Environment("openai_client.py", ("openai>=3",)),
    "langchain": Environment("langchain_client.py", ("langchain", "langchain-openai", "langchain-anthropic")),
    "pydantic-ai": Environment("pydantic_ai_client.py", ("pydantic-ai-slim[openai,anthropic]",)),
    "openai-agents": Environment("openai_agents_client.py", ("openai-agents",)),
    "openai-js-6": Environment("openai_client.mjs", ("openai@6", "zod@4")),
    "openai-js": Environment("openai_client.mjs", ("openai", "zod", NODE)),
    "anthropic-js": Environment("anthropic_client.mjs", ("@anthropic-ai/sdk", "zod")),
    "ai-sdk-6": Environment(
        "ai_sdk.mjs", ("ai@6", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2", "@ai-sdk/anthropic@3", "zod@4")
    ),
    "ai-sdk": Environment("ai_sdk.mjs", (*AI_SDK, "zod", NODE)),
    "langchain-js": Environment("langchain_client.mjs", (*LANGCHAIN_JS, NODE)),
}


def install(folder: Path, environment: Environment) -> str | None:
    """Create the environment in an empty folder, with its script. Return None, or why this is impossible."""
    missing = [program for program in ("node", "npm") if environment.is_node and shutil.which(program) is None]
    if missing:
        return f"skipped: {' and '.join(missing)} is not in PATH"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for script in (environment.script, "checks.mjs" if environment.is_node else "checks.py"):
        shutil.copy(SCRIPTS / script, folder)
    if environment.is_node:
        (folder / "package.json").write_text("{}")
        npm = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        unfit = _failure(folder, [*npm, NODE]) if NODE in environment.packages else None
        return unfit or _failure(folder, [*npm, *environment.packages])
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return _failure(folder, [*pip, *environment.packages])


def _failure(folder: Path, argv: Sequence[str]) -> str | None:
    """Run an installation. npm uses a Node.js that is already there, because it chooses versions for this Node.js."""
    path = f"{folder / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"
    with log_of(folder).open("w") as log:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={**os.environ, "PATH": path},
            stdout=log,
            stderr=log,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    return None if done.returncode == 0 else f"failed: {Path(argv[0]).name} install, see {log_of(folder)}"


def log_of(folder: Path) -> Path:
    return folder.with_suffix(".log")


def command_of(folder: Path, environment: Environment) -> list[str]:
    if not environment.is_node:
        return [str(folder / "venv" / "bin" / "python"), environment.script]
    own = folder / "node_modules" / ".bin" / "node"  # from the npm package of this name
    return [str(own if own.exists() else "node"), environment.script]


def run(folder: Path, environment: Environment, url: str) -> str:
    """Run the script, and return the outcome of its checks."""
    variables = clean_environment(LANGSMITH_TRACING="false", OPENAI_AGENTS_DISABLE_TRACING="1")
    variables.pop("PYTHONPATH", None)
    with log_of(folder).open("a") as log:
        try:
            done = subprocess.run(
                [*command_of(folder, environment), url],
                cwd=folder,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=RUN_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"failed: longer than {RUN_TIMEOUT_S} s, see {log_of(folder)}"
        log.write(done.stdout)
    lines = done.stdout.splitlines()
    num_passed = sum(": passed in " in line for line in lines)
    failed = [line.removesuffix(": failed") for line in lines if line.endswith(": failed")]
    if done.returncode or failed or not num_passed:
        return f"failed: {', '.join(failed) or 'the script'}, see {log_of(folder)}"
    return f"passed ({num_passed} checks)"


def versions(folder: Path, environment: Environment) -> str:
    """Return the versions of the named packages that the environment has."""
    names = [package[0] + package[1:].partition("@")[0] for package in environment.packages if package != NODE]
    if environment.is_node:
        files = {name: folder / "node_modules" / name / "package.json" for name in names}
        found = {name: json.loads(file.read_text())["version"] for name, file in files.items() if file.exists()}
        node = subprocess.run(
            [*command_of(folder, environment)[:1], "--version"], capture_output=True, text=True, check=False
        )
        found["node"] = node.stdout.strip().removeprefix("v")
    else:
        names = [name.partition("[")[0].partition("=")[0].partition(">")[0] for name in names]
        argv = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "list", "--format", "json"]
        listed = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        found = {one["name"]: one["version"] for one in listed if one["name"] in names}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in ENVIRONMENTS]:
        sys.exit(f"unknown environment {unknown[0]!r}; environments: {', '.join(ENVIRONMENTS)}")
    rows = []
    with tempfile.TemporaryDirectory() as name, RedisServer.start(Path(name), port=free_port()) as server:
        worker = WorkerProcess(Path(name), server.url, CELLAMA_REASONING_KEY="a secret")
        gateway = GatewayProcess(Path(name), server.url)
        try:
            worker.wait_ready()
            url = gateway.wait_ready().url
            for name in names or ENVIRONMENTS:
                environment, folder = ENVIRONMENTS[name], FOLDER / name
                unfit = install(folder, environment)
                outcome = unfit or run(folder, environment, url)
                rows.append((name, "" if unfit else versions(folder, environment), outcome))
                print(f"{name}: {outcome}", flush=True)
        finally:
            gateway.stop()
            worker.stop()
    print("\n| environment | versions | result |\n|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return any(outcome.startswith("failed") for *_, outcome in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
