"""Fixtures for the example sites, which start once per module."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from cellama.api.machine.redis_server import free_port

from ..conftest import WorkerProcess
from .sites import EXAMPLES, Site, started


@pytest.fixture(scope="module")
def fastapi_site(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    port, log = free_port(), tmp_path_factory.mktemp("fastapi") / "log"
    argv = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port)]
    with started(argv, EXAMPLES / "fastapi_sse", log) as server:
        yield Site(port, server)


@pytest.fixture(scope="module")
def django_site(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    port, logs, folder = free_port(), tmp_path_factory.mktemp("django"), EXAMPLES / "django_site"
    celery = [sys.executable, "-m", "celery", "-A", "config", "worker", "-P", "solo", "-Q", "site", "-n", "site@%h"]
    argv = [sys.executable, "-m", "django", "runserver", "--settings", "config.settings", "--noreload", str(port)]
    settings = {"PYTHONPATH": str(folder)}
    quiet = ["--without-gossip", "--without-mingle"]
    with (
        started([*celery, *quiet], folder, logs / "celery", **settings),
        started(argv, folder, logs / "server", **settings) as server,
    ):
        yield Site(port, server)
