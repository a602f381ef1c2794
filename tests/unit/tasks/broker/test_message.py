"""The message of a job is settled exactly once, by the first of several threads."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kombu.message import Message

from cellama.tasks import app, generate
from cellama.tasks.broker.message import JobRequest
from cellama.tasks.broker.pool import JobControl


def a_request(**handlers: Any) -> JobRequest:
    headers = {"id": str(uuid.uuid4()), "task": generate.name, "lang": "py"}
    body = ((), {}, {})
    message = Message(body=body, headers=headers)
    return JobRequest(message, app=app, body=body, headers=headers, decoded=True, **handlers)


@pytest.mark.parametrize("second", ["acknowledge", "reject"])
@pytest.mark.parametrize("first", ["acknowledge", "reject"])
def test_message_is_settled_once_when_two_threads_end_its_job(first: str, second: str) -> None:
    settled: list[str] = []

    def settle(kind: str) -> Callable[..., None]:
        def settled_as(*_: Any) -> None:
            settled.append(kind)
            # A second thread settles the message before Celery has recorded that the first one did.
            if len(settled) == 1:
                other = threading.Thread(target=getattr(request, second))
                other.start()
                other.join(10)

        return settled_as

    request = a_request(on_ack=settle("acknowledge"), on_reject=settle("reject"))
    getattr(request, first)()
    assert settled == [first]
    assert request.acknowledged


def test_tasks_use_job_requests() -> None:
    from kombu.utils.imports import symbol_by_name

    assert symbol_by_name(generate.Request) is JobRequest


def test_message_released_with_the_last_event_is_forgotten_without_another_release() -> None:
    forgotten: list[Any] = []
    request = a_request(on_ack=lambda *_: pytest.fail("Redis has already released it"))
    request.message.channel = SimpleNamespace(qos=SimpleNamespace(forget=forgotten.append))
    control = JobControl(1)
    control.is_settled = True
    request._apply_result = lambda: control
    request.acknowledge()
    request.acknowledge()
    assert (forgotten, request.acknowledged) == ([request.message], True)


def test_celery_reports_a_revocation_before_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def note(step: str) -> Callable[..., None]:
        return lambda *args, **_: steps.append((step, *args[:1]))

    request = a_request(on_ack=lambda *_: steps.append("settled"))
    monkeypatch.setattr(request.task.backend, "mark_as_revoked", note("told"))
    pool = SimpleNamespace(terminate_job=note("ended"))
    request.terminate(pool)  # before the job has started
    assert steps == []
    request.on_accepted(7, 0.0)
    assert steps == [("told", request.id), "settled", ("ended", 7)]


def test_revocation_is_not_reported_for_a_job_that_is_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    request, control = a_request(), JobControl(7)
    monkeypatch.setattr(request.task.backend, "mark_as_revoked", lambda *_, **__: pytest.fail("it is failing"))
    request._apply_result = lambda: control
    request.time_start, request.worker_pid = 1.0, 7
    assert control.claim_outcome("failed")
    request.terminate(SimpleNamespace(terminate_job=lambda *_: pytest.fail("it is failing")))
    assert control.claim_outcome("failed")


def test_job_does_not_fail_once_its_revocation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a_request().task.backend, "mark_as_revoked", lambda *_, **__: None)
    request, control, ended = a_request(on_ack=lambda *_: None), JobControl(7), []
    request._apply_result = lambda: control
    request.time_start, request.worker_pid = 1.0, 7
    request.terminate(SimpleNamespace(terminate_job=lambda number, signal: ended.append(number)))
    assert ended == [7]
    assert not control.claim_outcome("failed")


def test_revocation_ends_the_job_even_if_celery_fails_to_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    request, ended = a_request(), []

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(request.task.backend, "mark_as_revoked", away)
    request.time_start, request.worker_pid = 1.0, 7
    with pytest.raises(ConnectionError):
        request.terminate(SimpleNamespace(terminate_job=lambda number, signal: ended.append(number)))
    assert ended == [7]
