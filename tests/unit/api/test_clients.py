"""The two clients against each other, against what their keywords end in, and with a Redis of their own."""

from __future__ import annotations

import inspect
import socket
from typing import Any

import pytest
from kombu.transport.redis import Transport

from cellama.api import AsyncClient, AsyncJob, BatchParams, Client, Job, RedisUnreachable
from cellama.api.batch.options import BatchOptions
from cellama.tasks import app
from cellama.tasks.contract.kinds.chat import ChatJob
from cellama.tasks.contract.kinds.embed import EmbedJob
from cellama.tasks.jobs import JobTask, app_at

NOT_AWAITED = {"stream", "job"}


def methods(kind: type[Any]) -> dict[str, Any]:
    return {name: member for name, member in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults; annotations differ where one says Iterator, the other AsyncIterator."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Job, AsyncJob)])
def test_clients_have_the_same_methods(blocking: type[Any], awaited: type[Any]) -> None:
    here, there = methods(blocking), methods(awaited)
    assert here.keys() == there.keys()
    for name, method in here.items():
        told = shape(method)
        assert [each for each in told if each[0] != "on_progress"] == [
            each for each in shape(there[name]) if each[0] != "on_progress"
        ], name
        if name not in NOT_AWAITED:
            assert inspect.iscoroutinefunction(there[name]), name


def test_every_method_of_a_client_says_what_it_does() -> None:
    assert not [name for kind in (Client, Job) for name, method in methods(kind).items() if not method.__doc__]


def test_keywords_of_a_bulk_run_are_its_options_and_parameters_of_lines() -> None:
    own = set(BatchOptions.__dataclass_fields__) - {"input", "output", "params"}
    lines = ChatJob.model_fields.keys() | EmbedJob.model_fields.keys()
    assert BatchParams.__optional_keys__ == own | (lines - {"messages", "texts"})


def test_client_of_a_url_speaks_to_that_redis() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{unused.getsockname()[1]}/3"
        with Client(url) as client:
            for call in (client.workers, lambda: client.cancel("x"), lambda: client.generate("tiny", "Hi", wait=True)):
                with pytest.raises(RedisUnreachable, match=r"redis://:\*\*\*@127.0.0.1:\d+/3 does not answer"):
                    call()


def test_celery_is_not_asked_to_reach_a_redis_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would try again and again."""

    def connect(_: Transport) -> None:
        pytest.fail("kombu tries to connect")

    monkeypatch.setattr(Transport, "establish_connection", connect)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/3"
        with pytest.raises(RedisUnreachable):
            app_at(url).tasks["cellama.generate"].delay("tiny", "Hi")


def test_url_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"url is 'http://localhost'"):
        Client("http://localhost")


def test_tasks_of_another_url_are_its_own() -> None:
    other = app_at("redis://127.0.0.1:1/4")
    ours = {name for name, task in app.tasks.items() if isinstance(task, JobTask)}
    assert {name for name, task in other.tasks.items() if isinstance(task, JobTask)} == ours
    assert all(other.tasks[name].app is other and app.tasks[name].app is app for name in ours)
    assert other.conf.broker_url == "redis://127.0.0.1:1/4" != app.conf.broker_url
