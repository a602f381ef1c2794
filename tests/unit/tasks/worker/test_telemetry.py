"""Telemetry reaches hooks and the log, and hooks never delay engines."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellama.config.logging import telemetry_logger
from cellama.engine import Engine, EngineOptions, InvalidRequest, RequestStats, StepStats
from cellama.engine.fake import FakeBackend
from cellama.tasks.middleware import Middlewares
from cellama.tasks.worker import telemetry
from cellama.tasks.worker.telemetry import Hook, Logged, Stats, TelemetryHook, TelemetryRelay, telemetry_middlewares

from ....conftest import wait_until

HOOKS = """
class Counter:
    def __init__(self):
        self.events = []
    def __call__(self, stats):
        self.events.append(stats)

class Broken:
    def __init__(self):
        raise RuntimeError("no server there")

def hook(stats):
    pass

number = 7
"""


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(FakeBackend(), EngineOptions(n_parallel=4, n_batch=64), name="mine")
    yield engine
    assert engine.close()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Collect the lines of the logger for telemetry."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    logger = telemetry_logger()
    others, logger.handlers = logger.handlers, [handler]
    yield written
    logger.handlers = others


def relay_to(hook: Hook | None, logged: Logged = "off") -> TelemetryRelay:
    relay = TelemetryRelay("w@host")
    relay.start(Middlewares([relay, *telemetry_middlewares(hook, logged)]))
    return relay


def report(engine: Engine, hook: Hook | None, logged: Logged = "off", times: int = 1) -> None:
    """Run requests on an engine whose telemetry is relayed, until all have ended."""
    relay = relay_to(hook, logged)
    relay.watch(engine)
    for _ in range(times):
        assert engine.generate("hello", max_tokens=4)
    assert engine.close()
    relay.close()


def test_hook_receives_typed_events_that_name_the_model_and_worker(engine: Engine) -> None:
    events: list[Stats] = []
    report(engine, events.append)
    assert {(event.model, event.worker) for event in events} == {("mine", "w@host")}
    steps = [event for event in events if isinstance(event, StepStats)]
    (request,) = [event for event in events if isinstance(event, RequestStats)]
    assert sum(step.prefill_tokens for step in steps) == 5
    assert (request.generated_tokens, request.mode, request.seq_id) == (4, "generate", 0)
    assert [event.at for event in events] == sorted(event.at for event in events)


@pytest.mark.parametrize("error", [ValueError("a mistake"), SystemExit(3)])
def test_failing_hook_is_logged_once_per_event_type_and_loses_no_token(
    engine: Engine, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Stats] = []

    def fail(stats: Stats) -> None:
        calls.append(stats)
        raise error

    report(engine, fail, times=3)
    assert len(calls) > 3
    assert sorted(record.message for record in caplog.records if record.exc_info) == [
        f"middleware hook failed (middleware=TelemetryHook, hook={hook}): "
        "it is still called, but further failures are not logged"
        for hook in ("on_request", "on_step")
    ]


def test_hanging_hook_loses_events_but_no_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "MAX_EVENTS", 3)
    monkeypatch.setattr(telemetry, "CLOSE_S", 0.01)
    entered, end = threading.Event(), threading.Event()
    relay = relay_to(lambda stats: (entered.set(), end.wait())[0])
    relay.watch(engine)
    assert engine.generate("hello", max_tokens=4)
    wait_until(entered.is_set, "a call of the hook")
    assert engine.generate("hello", max_tokens=40)
    relay.close()
    end.set()
    assert relay.num_dropped > 0
    assert caplog.text.count("the hooks are too slow") == 1
    assert "telemetry events lost" in caplog.text


@pytest.mark.parametrize(
    ("logged", "kinds"), [("off", set()), ("requests", {"request"}), ("steps", {"request", "step"})]
)
def test_telemetry_log_writes_the_configured_events(
    engine: Engine, lines: list[str], logged: Logged, kinds: set[str]
) -> None:
    report(engine, None, logged)
    events = [json.loads(line) for line in lines]
    assert {event["event"] for event in events} == kinds
    assert all((event["model"], event["worker"]) == ("mine", "w@host") for event in events)
    for event in events:
        if event["event"] == "request":
            assert event["mode"] == "generate"
            assert (event["prompt_tokens"], event["prefix_cache_ratio"]) == (5, 0.0)


def test_relay_adds_no_listener_without_hooks(engine: Engine) -> None:
    before = set(threading.enumerate())
    relay = relay_to(None)
    relay.watch(engine)
    assert set(threading.enumerate()) <= before
    assert engine._core.telemetry.on_step == engine._core.telemetry.on_request == []
    relay.close()


def test_hook_may_be_a_function_or_a_callable_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooks_of_a_test.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    stats: Any = "figures"
    for name in ("hook", "Counter"):
        TelemetryHook(f"hooks_of_a_test:{name}").on_step(stats)
    for path, reason in (
        ("nowhere:hook", "ModuleNotFoundError: No module named 'nowhere'"),
        ("hooks_of_a_test:nothing", "AttributeError"),
        ("hooks_of_a_test:Broken", "RuntimeError: no server there"),
        ("hooks_of_a_test:number", "can't be called"),
    ):
        with pytest.raises(InvalidRequest, match=f"telemetry_hook '{path}' can't be .*{reason}|{reason}"):
            TelemetryHook(path)
