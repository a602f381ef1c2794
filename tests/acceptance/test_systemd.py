"""Test the systemd unit of the documentation: systemd accepts it, and its command starts and stops as it describes."""

from __future__ import annotations

import configparser
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.config import Settings

from ..conftest import MODELS, PATIENCE_S, clean_environment
from .machines import CELLAMA

UNIT = Path(__file__).parents[2] / "docs/examples/several_machines/cellama-worker.service"


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]  # names of options are case-sensitive
    unit.read(UNIT)
    return unit["Service"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_unit(service: configparser.SectionProxy, tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    command = service["ExecStart"].split()[0]
    unit.write_text(UNIT.read_text().replace(command, shutil.which("true") or "").replace("User=cellama\n", ""))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=PATIENCE_S)
    assert UNIT.name not in done.stderr
    assert done.returncode == 0


def test_command_of_the_unit_serves_jobs_and_stops_on_sigterm(
    service: configparser.SectionProxy, tmp_path: Path
) -> None:
    (tmp_path / "redis").mkdir()
    with RedisServer.start(tmp_path / "redis") as server, Client(server.url) as client:
        environment = clean_environment(CELLAMA_REDIS_URL=server.url, CELLAMA_MODELS=MODELS)
        argv = [*CELLAMA, *service["ExecStart"].split()[1:]]
        worker = subprocess.Popen(argv, cwd=tmp_path, env=environment, start_new_session=True)
        try:
            job = client.generate("tiny", "Once upon a time", max_tokens=4, wait=True)
            assert job.result(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
            worker.send_signal(signal.SIGTERM)  # as systemd does by default
            assert worker.wait(int(service["TimeoutStopSec"])) == 0, "Restart=on-failure does not start it again"
        finally:
            worker.kill()
            worker.wait()


def test_unit_leaves_enough_time_for_draining(service: configparser.SectionProxy) -> None:
    assert int(service["TimeoutStopSec"]) > Settings.model_fields["drain_s"].default
