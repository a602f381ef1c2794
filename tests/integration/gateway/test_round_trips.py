"""Run the scripts of `make clients` with the clients that are installed here, and with OpenAI's client for Node.js."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ...clients.matrix import ENVIRONMENTS, SCRIPTS, install, log_of, run
from ...conftest import PATIENCE_S, clean_environment
from ...gateways import GatewayProcess

NODE = "openai-js-6"


@pytest.mark.parametrize("package", ["openai", "langchain"])
def test_python_client_can_send_its_messages_back(gateway: GatewayProcess, package: str, tmp_path: Path) -> None:
    assert importlib.util.find_spec(f"{package}_openai" if package == "langchain" else package)
    argv = [sys.executable, str(SCRIPTS / f"{package}_client.py"), gateway.url]
    environment = clean_environment(LANGSMITH_TRACING="false")
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_javascript_client_can_send_its_messages_back(gateway: GatewayProcess, tmp_path: Path) -> None:
    folder, environment = tmp_path / NODE, ENVIRONMENTS[NODE]
    if unfit := install(folder, environment):
        pytest.skip(f"{unfit}: {log_of(folder).read_text()[-300:] if log_of(folder).exists() else ''}")
    outcome = run(folder, environment, gateway.url)
    assert outcome.startswith("passed"), outcome + log_of(folder).read_text()[-4000:]
