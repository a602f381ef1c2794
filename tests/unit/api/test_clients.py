"""Test that both clients have the same methods, that their keywords match the payloads, and that `url` is used."""

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
    """Return names, kinds and defaults. Annotations differ, for example Iterator and AsyncIterator."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Job, AsyncJob)])
def test_clients_have_the_same_methods(blocking: type[Any], awaited: type[Any]) -> None:
    here, there = methods(blocking), methods(awaited)
    assert here.keys() == there.keys()
    for name, method in here.items():
        blocking_shape, awaited_shape = (
            [each for each in shape(function) if each[0] != "on_progress"] for function in (method, there[name])
        )
        assert blocking_shape == awaited_shape, name
        if name not in NOT_AWAITED:
            assert inspect.iscoroutinefunction(there[name]), name


def test_every_method_of_the_clients_has_a_docstring() -> None:
    assert not [name for kind in (Client, Job) for name, method in methods(kind).items() if not method.__doc__]


def test_batch_params_consist_of_run_options_and_line_parameters() -> None:
    own = set(BatchOptions.__dataclass_fields__) - {"input", "output", "params", "content"}
    lines = ChatJob.model_fields.keys() | EmbedJob.model_fields.keys()
    assert BatchParams.__optional_keys__ == own | (lines - {"messages", "texts"})


def test_client_connects_to_the_redis_of_its_url() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://:secret@127.0.0.1:{unused.getsockname()[1]}/3"
        with Client(url) as client:
            for call in (client.workers, lambda: client.cancel("x"), lambda: client.generate("tiny", "Hi", wait=True)):
                with pytest.raises(RedisUnreachable, match=r"redis://:\*\*\*@127.0.0.1:\d+/3 does not answer"):
                    call()


def test_delay_fails_without_kombu_retries_when_redis_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_: Transport) -> None:
        pytest.fail("kombu tries to connect")

    monkeypatch.setattr(Transport, "establish_connection", connect)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/3"
        with pytest.raises(RedisUnreachable):
            app_at(url).tasks["cellama.generate"].delay("tiny", "Hi")


def test_client_rejects_an_invalid_url() -> None:
    with pytest.raises(ValueError, match=r"url: 'http://localhost'"):
        Client("http://localhost")


def test_app_at_returns_an_app_with_its_own_copies_of_all_tasks() -> None:
    other = app_at("redis://127.0.0.1:1/4")
    ours = {name for name, task in app.tasks.items() if isinstance(task, JobTask)}
    assert {name for name, task in other.tasks.items() if isinstance(task, JobTask)} == ours
    assert all(other.tasks[name].app is other and app.tasks[name].app is app for name in ours)
    assert other.conf.broker_url == "redis://127.0.0.1:1/4" != app.conf.broker_url
