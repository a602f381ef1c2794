"""Test structured output with unmodified clients of other projects, using pydantic models and Zod schemas.

Each environment is created in a temporary directory with pip or npm, which require access to their registries.
`installed` is the environment of the current Python. The bundled model gets a bias towards closing tokens so that
answers end within max_tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving
from cellama.bench.models.brief import brief_sampling
from cellama.bench.peers.gateway_process import gateway
from cellama.engine.bundled import TINY_PATH

from .everyday_schemas import ZOD
from .structured_clients import (
    BY_CLIENT,
    BY_GATEWAY,
    LOOSE,
    MODEL,
    NUM_AT_ONCE,
    VALID,
    WRONG,
    SchemaCall,
    is_refused_rightly,
)

PYTHON = {
    "openai-2": ("openai>=2,<3", "anthropic>=1", "instructor>=1.15", "langchain-openai>=1", "langchain-anthropic>=1"),
    "openai-3": ("openai>=3", "pydantic>=2"),
}
NODE = ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod")
REFUSED = "refused though OpenAI's rules for tools and strict schemas allow it"
INSTALLED, AI_SDK = "installed", "ai-sdk"
SOURCES = Path(__file__).parent
SCRIPTS = ("everyday_schemas.py", "structured_clients.py", "structured_clients.mjs")
TIMEOUT_S = 1200.0  # seconds for an installation, and for all calls of an environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--environments",
        nargs="+",
        choices=[INSTALLED, *PYTHON, AI_SDK],
        default=[*PYTHON, AI_SDK],
        help="environments to test; openai-2 also contains langchain, instructor and anthropic, and ai-sdk requires "
        "Node.js",
    )


def run(args: argparse.Namespace) -> Report:
    model = {"id": MODEL, "source": str(TINY_PATH), "n_parallel": NUM_AT_ONCE, "ctx_per_slot": 2048, "threads": 1}
    model |= {"sampling": brief_sampling()}
    port, calls = free_port(), []
    with serving(model) as service, gateway(port):
        for name in args.environments:
            calls += _calls(name, service.folder / name, f"http://127.0.0.1:{port}")
    refused = [call for call in calls if call.outcome == BY_GATEWAY]
    caveats = [
        "loose: pydantic rejects an answer for a rule that the sent schema does not contain. The type of pydantic's "
        "error shows this, or the client is known to send less than the model's schema. No JSON Schema validator "
        "checks it.",
        *(f"refused by gateway: {how}: {', '.join(names)}" for how, names in _names(refused)),
        *(f"refused by client: {how}: {', '.join(names)}" for how, names in _names(_with(calls, BY_CLIENT))),
    ]
    not_right = [call for call in refused if not is_refused_rightly(call)]
    bad = _with(calls, WRONG) + not_right
    ratios = {"% of calls that the gateway accepts": 100 * (1 - len(refused) / len(calls)), REFUSED: len(not_right)}
    wrong = [f"{call.client} {call.how}: {call.model}: {call.outcome}: {call.detail[:300]}" for call in bad]
    return Report(_rows(calls), ratios, {REFUSED: "0"}, caveats, wrong)


def _calls(name: str, folder: Path, url: str) -> list[SchemaCall]:
    """Create an environment and call its clients. Raises CalledProcessError or TimeoutExpired."""
    package = folder.joinpath(*__package__.split("."))  # the clients' Python has no cellama, but modules of that name
    package.mkdir(parents=True)
    for script in SCRIPTS:
        shutil.copy(SOURCES / script, package if script.endswith(".py") else folder)
    argv = [*_argv(name, folder), url] + [json.dumps(list(ZOD))] * (name == AI_SDK)
    apart = {key: value for key, value in os.environ.items() if not key.startswith(("CELLAMA_", "PYTHON"))}
    done = subprocess.run(argv, cwd=folder, env=apart, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
    return [SchemaCall(**json.loads(line)) for line in done.stdout.splitlines()]


def _argv(name: str, folder: Path) -> list[str]:
    """Install an environment's packages, and return the command that calls its clients, without the URL."""
    if name == AI_SDK:
        (folder / "package.json").write_text("{}")
        _install(["npm", "install", "--no-audit", "--no-fund", *NODE], folder)
        return ["node", "structured_clients.mjs"]
    python = sys.executable
    if name != INSTALLED:
        _install([sys.executable, "-m", "venv", "venv"], folder)
        python = str(folder / "venv" / "bin" / "python")
        _install([python, "-m", "pip", "install", "--quiet", *PYTHON[name]], folder)
    return [python, "-m", f"{__package__}.structured_clients"]


def _install(argv: Sequence[str], folder: Path) -> None:
    subprocess.run(argv, cwd=folder, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)


def _with(calls: Sequence[SchemaCall], outcome: str) -> list[SchemaCall]:
    return [call for call in calls if call.outcome == outcome]


def _how(call: SchemaCall) -> tuple[str, str, str]:
    return call.client, call.version, call.how


def _names(calls: Sequence[SchemaCall]) -> list[tuple[str, list[str]]]:
    return [(" ".join(how), [call.model for call in of_one]) for how, of_one in groupby(calls, _how)]


def _rows(calls: Sequence[SchemaCall]) -> list[dict[str, Any]]:
    rows = []
    for (client, version, how), of_one in groupby(calls, _how):
        counts = Counter(call.outcome for call in of_one)
        outcomes = {outcome: counts[outcome] for outcome in (VALID, LOOSE, BY_CLIENT, BY_GATEWAY, WRONG)}
        rows.append({"client": client, "version": version, "how": how, "models": counts.total(), **outcomes})
    return rows
