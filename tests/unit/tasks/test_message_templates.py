"""Messages that are made from a template of a message by Celery and kombu."""

from __future__ import annotations

import base64
import json
import uuid
from typing import Any

import pytest
from celery import signals

from cellama.tasks import generate
from cellama.tasks.calls.enqueue import Template, Templates
from cellama.tasks.state.ledger import Message

PROMPTS = ["Hi", 'quoted "Hi"', "ünïcode \u2028 \U0001f600", "\\ @ \n"]


def decoded(message: Message) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(message.payload)
    return {**content, "body": json.loads(base64.b64decode(content["body"]))}


def body_of(prompt: str) -> str:
    return json.dumps([["tiny", prompt], {}])


def made(prompt: str, job_id: str) -> Message:
    """Return a message in kombu's format, with an event."""
    body = json.dumps([["tiny", prompt], {}, {"callbacks": None, "chord": None}])
    headers = {"id": job_id, "root_id": job_id, "argsrepr": "a", "kwargsrepr": "k", "cellama_submitted_at": 1.5}
    headers["eta"] = None
    properties = {"correlation_id": job_id, "delivery_tag": str(uuid.uuid4()), "priority": 3}
    event = {"uuid": job_id, "root_id": job_id, "args": "a", "kwargs": "k", "timestamp": 2.5, "clock": 7}
    frame = {"body": base64.b64encode(json.dumps(event).encode()).decode(), "properties": {"delivery_tag": "t"}}
    whole = {"body": base64.b64encode(body.encode()).decode(), "headers": headers, "properties": properties}
    return Message("cellama:queue:tiny", json.dumps(whole), (("topic", json.dumps(frame)),))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_message_from_a_template_contains_only_values_of_its_own_job(prompt: str) -> None:
    template = Template(made("a secret", "first"), body_of("a secret"))
    message = template.message(
        "own", body_of(prompt), argsrepr=f"({prompt!r},)", kwargsrepr="{}", submitted_at=9.25, clock=8
    )
    content, event = decoded(message), decoded(Message("", message.events[0][1]))["body"]
    assert content["body"][:2] == [["tiny", prompt], {}]
    assert content["headers"] == {
        "id": "own",
        "root_id": "own",
        "argsrepr": f"({prompt!r},)",
        "kwargsrepr": "{}",
        "cellama_submitted_at": 9.25,
        "eta": None,
    }
    assert content["properties"]["correlation_id"] == "own"
    assert (event["uuid"], event["args"], event["clock"]) == ("own", f"({prompt!r},)", 8)
    assert "secret" not in json.dumps(content)
    tags = {content["properties"]["delivery_tag"], decoded(made("x", "y"))["properties"]["delivery_tag"]}
    assert len(tags) == 2


@pytest.mark.parametrize("submitted_at", ["soon", float("nan"), 1e308, [[]]])
def test_submission_time_set_by_a_caller_is_kept(submitted_at: Any) -> None:
    template = Template(made("Hi", "first"), body_of("Hi"))
    content = decoded(
        template.message("own", body_of("Hi"), argsrepr="a", kwargsrepr="k", submitted_at=submitted_at, clock=8)
    )["headers"]
    assert repr(content["cellama_submitted_at"]) == repr(submitted_at)


def test_message_gets_no_template_when_a_template_would_not_reproduce_it() -> None:
    odd = made("Hi", "first")
    templates = Templates()
    dense = Message(odd.key, odd.payload.replace(", ", ","), odd.events)
    for common, message in enumerate((dense, Message("k", "{}"))):
        templates.learn((common,), message, body_of("Hi"))
        assert templates.get((common,)) is None
    templates.learn((3,), odd, body_of("another body"))
    assert templates.get((3,)) is None


def test_celery_builds_the_message_when_a_job_has_additional_options() -> None:
    usual, late = (generate._check(("tiny", "Hi"), {}, options) for options in ({}, {"countdown": 5}))
    own = generate._check(("tiny", "Hi"), {}, {"headers": {"own": 1}})
    assert usual.fits_template
    assert not late.fits_template
    assert not own.fits_template


def test_celery_builds_messages_while_a_signal_handler_is_connected() -> None:
    def note(**_: Any) -> None:
        """Handle the signal, as tracers do to add headers."""

    signals.before_task_publish.connect(note)
    try:
        assert generate._template_key(is_bulk=False) is None
    finally:
        signals.before_task_publish.disconnect(note)
    assert generate._template_key(is_bulk=False) is not None


def test_message_from_a_template_has_the_trace_of_its_job() -> None:
    first = made("Hi", "first")
    whole = json.loads(first.payload)
    whole["headers"]["traceparent"] = "00-first"
    traced = Message(first.key, json.dumps(whole), first.events)
    template = Template(traced, body_of("Hi"), ["traceparent"])
    message = template.message(
        "own", body_of("Hi"), argsrepr="a", kwargsrepr="k", submitted_at=1.0, clock=8, trace={"traceparent": '00-"own"'}
    )
    assert decoded(message)["headers"]["traceparent"] == '00-"own"'
