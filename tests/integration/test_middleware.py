"""A custom middleware, which is the example on the how-to page."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

import pytest

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import generate
from cellama.tasks.contract.errors import JobFailed

from ..conftest import PATIENCE_S, WorkerProcess

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "middleware.md"
BROKEN = """
from cellama.tasks.middleware import Middleware

class Broken(Middleware):
    def fail(self, *args):
        raise RuntimeError("a mistake in a hook")

    before_attempt = before_request = after_first_token = after_request = after_attempt = fail
    on_step = on_request = on_model_loaded = close = fail
"""


def test_documented_middleware_logs_attempts_and_failing_middleware_affects_no_job(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    name = f"t{uuid.uuid4().hex[:8]}"
    example = re.search(r'```python title="job_log.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "job_log.py").write_text(example[1])
    (tmp_path / "broken.py").write_text(BROKEN)
    model = json.dumps([{"id": name, "source": "bundled://tiny", "n_parallel": 2, "threads": 1}])
    worker = WorkerProcess(
        tmp_path,
        redis_server.url,
        name=name,
        CELLAMA_MODELS=model,
        CELLAMA_MIDDLEWARE='["broken:Broken", "job_log:JobLog"]',
    )
    try:
        worker.wait_ready()
        good = generate.delay(name, "Once upon a time", max_tokens=4)
        bad = generate.delay(name, "Once upon a time", adapters={"nothing": 1.0})
        assert good.get(timeout=PATIENCE_S)["usage"]["completion_tokens"] == 4
        with pytest.raises(JobFailed, match="nothing"):
            bad.get(timeout=PATIENCE_S)
    finally:
        assert worker.stop() == 0
    lines = {line["job"]: line for line in map(json.loads, (tmp_path / "jobs.jsonl").read_text().splitlines())}
    assert {job_id: (line["task"], line["end"]) for job_id, line in lines.items()} == {
        good.id: ("cellama.generate", "success"),
        bad.id: ("cellama.generate", "failure"),
    }
    assert 0 < lines[good.id]["first_token_s"] <= lines[good.id]["seconds"]
    assert lines[bad.id]["first_token_s"] is None
    assert worker.log().count("(middleware=Broken, hook=after_attempt): it is still called") == 1
    assert "hook=after_attempt, num_failures=2)" in worker.log()
