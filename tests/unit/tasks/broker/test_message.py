"""The message of a job is settled once, whoever comes first."""

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
def test_a_message_is_settled_once_when_two_threads_end_its_job(first: str, second: str) -> None:
    settled: list[str] = []

    def settle(kind: str) -> Callable[..., None]:
        def settled_as(*_: Any) -> None:
            settled.append(kind)
            # Just then, before Celery notes that the first has settled it, another thread settles it too.
            if len(settled) == 1:
                other = threading.Thread(target=getattr(request, second))
                other.start()
                other.join(10)

        return settled_as

    request = a_request(on_ack=settle("acknowledge"), on_reject=settle("reject"))
    getattr(request, first)()
    assert settled == [first]
    assert request.acknowledged


def test_jobs_are_held_by_such_requests() -> None:
    from kombu.utils.imports import symbol_by_name

    assert symbol_by_name(generate.Request) is JobRequest


def test_a_message_that_went_with_the_end_of_its_job_is_only_forgotten() -> None:
    forgotten: list[Any] = []
    request = a_request(on_ack=lambda *_: pytest.fail("Redis has let go of it already"))
    request.message.channel = SimpleNamespace(qos=SimpleNamespace(forget=forgotten.append))
    control = JobControl(1)
    control.is_settled = True
    request._apply_result = lambda: control
    request.acknowledge()
    request.acknowledge()
    assert (forgotten, request.acknowledged) == ([request.message], True)


def test_what_celery_tells_of_a_revoke_is_told_before_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def note(step: str) -> Callable[..., None]:
        return lambda *args, **_: steps.append((step, *args[:1]))

    request = a_request(on_ack=lambda *_: steps.append("settled"))
    monkeypatch.setattr(request.task.backend, "mark_as_revoked", note("told"))
    pool = SimpleNamespace(terminate_job=note("ended"))
    request.terminate(pool)  # before it has begun
    assert steps == []
    request.on_accepted(7, 0.0)
    assert steps == [("told", request.id), "settled", ("ended", 7)]


def test_a_revoke_of_which_celery_can_not_tell_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    request, ended = a_request(), []

    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError

    monkeypatch.setattr(request.task.backend, "mark_as_revoked", away)
    request.time_start, request.worker_pid = 1.0, 7
    with pytest.raises(ConnectionError):
        request.terminate(SimpleNamespace(terminate_job=lambda number, signal: ended.append(number)))
    assert ended == [7]
