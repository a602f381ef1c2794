"""cellama's Celery app: the configuration that Celery and Flower show, and the logging of other apps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from cellama.tasks.app import make_app

FORMS = (
    "redis://user:sesame@localhost:1/0",
    "rediss://:sesame@localhost:1/0",
    "unix://user:sesame@/tmp/redis.sock?db=0",
    "sentinel://user:sesame@a:1;user:sesame@b:2/0?master_name=m&sentinel_username=su&sentinel_password=sesame",
)


@pytest.mark.parametrize("from_settings", [True, False])
@pytest.mark.parametrize("url", FORMS)
def test_inspected_configuration_contains_no_password(
    settings_environment: Callable[..., None], url: str, from_settings: bool
) -> None:
    settings_environment(**({"redis_url": url} if from_settings else {}))
    app = make_app(None if from_settings else url)
    assert "sesame" not in str(app.conf.table(with_defaults=True, censored=True))
    assert "sesame" not in app.backend.as_uri()
    assert app.backend.as_uri(include_password=True) == url


OTHER_APP = """
import logging
import cellama.tasks
from celery import Celery
Celery("site").log.setup(loglevel="INFO")
logging.getLogger("celery.app.trace").info("task succeeded")
"""


def test_worker_of_another_app_logs_in_celerys_format() -> None:
    done = subprocess.run([sys.executable, "-c", OTHER_APP], capture_output=True, text=True, check=True)
    assert done.stderr.strip().endswith(": INFO/MainProcess] task succeeded")
