"""Test Celery's call options: supported options are applied, and all others are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, signature
from kombu import Connection, Exchange, Queue

from cellama.tasks import app, chat, generate
from cellama.tasks.calls.enqueue import delay_s, settle_options
from cellama.tasks.contract.errors import InvalidJob, JobFailed, RedisUnreachable
from cellama.tasks.contract.names import queue_name
from cellama.tasks.jobs import JobTask

OWN = queue_name("tiny")


def settled(payload_priority: int | None = None, **options: Any) -> dict[str, Any]:
    settle_options(app, options, "tiny", payload_priority)
    return options


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"queue": None, "exchange": None, "routing_key": None},
        {"queue": OWN, "exchange": "", "routing_key": OWN},
        {"queue": Queue(OWN, Exchange(OWN), OWN), "producer": object(), "publisher": object()},
        {"queue": queue_name("another"), "exchange_type": "direct", "task_id": None, "serializer": "json"},
    ],
)
def test_options_route_a_job_to_the_queue_of_its_model(given: dict[str, Any]) -> None:
    assert settled(**given).items() - {("serializer", "json")} == {"queue": OWN, "priority": None}.items()


def test_options_accept_a_queue_served_by_user_workers() -> None:
    assert settled(queue=Queue("mine"), connection=app.connection_for_write())["queue"] == "mine"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"queue": Queue("q", Exchange("e", type="fanout"))}, "exchange of type fanout"),
        ({"exchange": "topics", "routing_key": "a.b"}, "exchange: 'topics' is not supported; jobs are sent directly"),
        ({"exchange": Exchange("e", type="topic"), "queue": "e"}, "exchange of type topic"),
        ({"routing_key": "elsewhere"}, "routing_key: 'elsewhere'"),
        ({"queue": 7}, "queue: 7"),
        ({"serializer": "pickle"}, "serializer: 'pickle'"),
        ({"task_id": 7}, "task_id: 7"),
        ({"priority": 10}, "priority: 10"),
        ({"priority": True}, "priority: True"),
        ({"priority": "high"}, "priority: 'high'"),
        ({"connection": Connection("redis://elsewhere:1/5")}, "connection: redis://.*elsewhere:1/5"),
    ],
)
def test_options_that_jobs_do_not_support_are_rejected(given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidJob, match=why):
        settled(**given)


def test_payload_priority_overrides_the_celery_option() -> None:
    assert settled(9, priority=2)["priority"] == 9
    assert settled(priority=2)["priority"] == 2


def test_delay_is_computed_from_countdown_or_eta() -> None:
    assert delay_s(app, {"countdown": 5}) == 5
    later = datetime.now(UTC) + timedelta(hours=1)
    for eta in (later, later.isoformat(), later.replace(tzinfo=None)):
        assert 3000 < delay_s(app, {"eta": eta}) <= 3600
    assert delay_s(app, {}) == delay_s(app, {"eta": datetime.now(UTC) - timedelta(days=1)}) == 0


@pytest.fixture
def eager() -> Iterator[None]:
    app.conf.task_always_eager = True
    yield
    app.conf.task_always_eager = False


def test_delay_is_rejected_when_tasks_are_eager(eager: None) -> None:
    with pytest.raises(InvalidJob, match="task_always_eager is enabled"):
        generate.delay("tiny", "Hi")


def test_tasks_cannot_be_called_outside_of_workers() -> None:
    with pytest.raises(InvalidJob, match="in its workers"):
        generate.apply(("tiny", "Hi"))
    with pytest.raises(InvalidJob, match="in its workers"):
        generate.s("tiny", "Hi").apply()
    with pytest.raises(JobFailed, match="in its workers"):
        generate("tiny", "Hi")
    with pytest.raises(InvalidJob, match="at the same time"):
        generate.chunks([("tiny", "Hi")], 10)


def test_signature_has_the_queue_of_its_model_in_any_app() -> None:
    assert generate.s("tiny", "Hi", priority=7).options == {"queue": OWN, "priority": 7}
    assert chat.s(model="tiny").options == {"queue": OWN, "priority": 3}
    assert generate.s("Hi").options == {}


@pytest.mark.parametrize("finalized", [False, True])
def test_tasks_keep_their_app_in_the_registry_of_another_app(finalized: bool) -> None:
    other = Celery("other", broker="memory://", set_as_current=False)
    if not finalized:
        other.finalize()
    assert other.tasks[generate.name] is app.tasks[generate.name]
    assert generate.app is app
    assert signature(dict(generate.s("tiny", "Hi")), app=other).type.app is app


@pytest.mark.parametrize(("policy", "tries"), [({"max_retries": 2}, 3), ({"max_retries": 0}, 1)])
def test_apply_async_follows_the_retry_policy(
    policy: dict[str, Any], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Any] = []

    def fail(self: Any, job: Any) -> None:
        tried.append(job)
        raise RedisUnreachable("away")

    monkeypatch.setattr(JobTask, "_queue", fail)
    with pytest.raises(RedisUnreachable):
        generate.apply_async(
            ("tiny", "Hi"), retry=True, retry_policy={**policy, "interval_start": 0, "interval_max": 0}
        )
    assert len(tried) == tries
    with pytest.raises(RedisUnreachable):
        generate.delay("tiny", "Hi")
    assert len(tried) == tries + 1
