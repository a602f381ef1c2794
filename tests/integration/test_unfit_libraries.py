"""cellama refuses an installed Celery, kombu or redis-py that lacks required parts, and names the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.keys import workers_key

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment, wait_until

# A release of Celery or kombu that has renamed a private part. Python imports this module before any other.
RENAMED = {
    "celery.concurrency.prefork:_run_ready_callbacks": (
        "import celery.concurrency.prefork as m; del m._run_ready_callbacks"
    ),
    "celery._state:_get_active_apps": "import celery._state as m; del m._get_active_apps",
    "celery.app.amqp:_callback_publish_retry": "import celery.app.amqp as m; del m._callback_publish_retry",
}
SEND = """
from cellama.tasks import generate
print("imported")
generate.delay("tiny", "Hi")
"""


@pytest.mark.parametrize("missing", RENAMED)
def test_worker_refuses_to_start_when_a_library_is_incompatible(
    redis_server: RedisServer, tmp_path: Path, missing: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RENAMED[missing])
    worker = WorkerProcess(tmp_path, redis_server.url, name="unfit", PYTHONPATH=str(tmp_path))
    try:
        assert wait_until(lambda: worker.process.poll() is not None, "the end of the worker")
        assert worker.process.returncode == Exit.CONFIG, worker.log()
        line = worker.log().splitlines()[-1]
        assert line.startswith("worker can't start: celery ")
        assert f"missing or have changed: {missing}; install the versions" in line
        assert " INFO " not in worker.log()  # no model was loaded, and no connection was opened
        assert not [name for name in worker.redis.hkeys(workers_key()) if name.startswith(b"unfit@")]
    finally:
        worker.stop()


@pytest.mark.parametrize(("missing", "is_needed"), list(zip(RENAMED, (False, True, True), strict=True)))
def test_producer_reports_an_incompatible_library_when_it_sends_a_job_but_not_on_import(
    redis_server: RedisServer, tmp_path: Path, missing: str, is_needed: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RENAMED[missing])
    environment = clean_environment(CELLAMA_REDIS_URL=redis_server.url, PYTHONPATH=str(tmp_path))
    argv = [sys.executable, "-c", SEND.replace('"tiny"', '"nobody-serves-this"')]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "imported\n"
    assert (f"have changed: {missing};" in done.stderr) == is_needed, done.stderr
    assert done.returncode == is_needed, done.stderr
