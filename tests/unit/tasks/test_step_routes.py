"""The queue that a user's step of a canvas gets before a cellama worker sends it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, group

from cellama.tasks import generate
from cellama.tasks.app import CellamaApp
from cellama.tasks.calls.canvas_steps import route_steps


def nothing(result: Any = None) -> None:
    """Stand for the body of a task."""


@pytest.fixture
def shop() -> Iterator[Celery]:
    """Return a user's app with routes."""
    with Celery("shop", broker="memory://", set_as_current=False) as app:
        app.conf.update(
            task_default_queue="shop",
            task_routes={
                "shop.letters": {"queue": "letters"},
                "shop.films": {"exchange": "media", "routing_key": "film"},
            },
        )
        for name in ("letters", "films", "others"):
            app.task(nothing, name=f"shop.{name}")
        app.task(nothing, name="shop.own", queue="attributed")
        yield app


def routed(step: Any) -> dict[str, Any]:
    options = {"link": step}
    route_steps(options, CellamaApp)
    found: dict[str, Any] = json.loads(json.dumps(options["link"]))
    return found


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("letters", {"queue": "letters"}),
        ("others", {"queue": "shop"}),
        ("own", {"queue": "attributed"}),
        ("films", {"exchange": "media", "routing_key": "film"}),
        ("unknown here", {"queue": "shop"}),
    ],
)
def test_step_gets_the_queue_that_its_app_would_choose(shop: Celery, name: str, place: dict[str, str]) -> None:
    assert routed(shop.signature(f"shop.{name}"))["options"] == place


def test_step_is_copied_and_keeps_the_users_options(shop: Celery) -> None:
    step = shop.tasks["shop.letters"].s(1).set(queue="mine", link=shop.tasks["shop.own"].s())
    before = copy.deepcopy(dict(step))
    found = routed(step)
    assert found["options"]["queue"] == "mine"
    assert found["options"]["link"]["options"] == {"queue": "attributed"}
    assert dict(step) == before


def test_nested_steps_are_routed_to_their_queues_and_jobs_stay_in_theirs(shop: Celery) -> None:
    letters, own = shop.tasks["shop.letters"], shop.tasks["shop.own"]
    found = routed(chain(generate.s("tiny", "Hi"), group(letters.s(), chain(own.s(), letters.s()))))
    first, second = found["kwargs"]["tasks"]
    assert first["options"]["queue"] == "cellama:queue:tiny"
    one, other = second["kwargs"]["tasks"]
    places = [one, *other["kwargs"]["tasks"]]
    assert [step["options"]["queue"] for step in places] == ["letters", "attributed", "letters"]
    assert routed(letters.map([1, 2]))["options"]["queue"] == "letters"


def test_step_without_an_app_in_this_process_is_unchanged() -> None:
    step = {"task": "elsewhere", "args": [], "kwargs": {}, "options": {}, "subtask_type": None, "immutable": False}
    options: dict[str, Any] = {"chain": [step], "chord": None}
    route_steps(options, Celery)  # as in a cellama worker, where all apps are its own
    assert options == {"chain": [step], "chord": None}
