"""Chat templates in jobs, which a setting must allow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks import apply_chat_template, chat
from cellama.tasks.contract.errors import InvalidJob, JobFailed

from ..conftest import PATIENCE_S
from .conftest import GREEDY

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
HELLO = [{"role": "user", "content": "Hello"}]


def test_job_template_replaces_the_model_template(
    model: str, start_worker: Callable[..., Any], settings_environment: Callable[..., None], redis_server: RedisServer
) -> None:
    settings_environment(redis_url=redis_server.url, chat_templates_in_jobs="true")
    start_worker(chat_templates_in_jobs="true")
    for template, expected in ((TEMPLATE, "user: Hello\nassistant:"), ("{{ messages[0].content }}", "Hello")):
        rendered = apply_chat_template.delay(model, HELLO, chat_template=template).get(timeout=PATIENCE_S)
        assert rendered["prompt"] == expected
    answer = chat.delay(model, HELLO, chat_template=TEMPLATE, max_tokens=3, **GREEDY).get(timeout=PATIENCE_S)
    assert answer["usage"]["prompt_tokens"] < 20
    for broken, message in (("{% if", "does not compile"), ("{% for i in range(10**9) %}.{% endfor %}", "template")):
        with pytest.raises(JobFailed, match=message):
            chat.delay(model, HELLO, chat_template=broken).get(timeout=PATIENCE_S)
    assert chat.delay(model, HELLO, max_tokens=3, **GREEDY).get(timeout=PATIENCE_S)["text"]


def test_job_template_is_rejected_by_default(
    client: Client, settings_environment: Callable[..., None], redis_server: RedisServer
) -> None:
    with pytest.raises(InvalidJob, match="chat_templates_in_jobs does not allow templates in jobs; remove it"):
        client.chat("tiny", HELLO, chat_template=TEMPLATE)
    settings_environment(redis_url=redis_server.url, chat_templates_in_jobs="true")
    with pytest.raises(JobFailed, match="chat_templates_in_jobs does not allow templates in jobs"):
        chat.delay("tiny", HELLO, chat_template=TEMPLATE).get(timeout=PATIENCE_S)
