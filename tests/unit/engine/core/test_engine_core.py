"""Tests of the engine without its thread, and of the inbox through which other threads reach it."""

from __future__ import annotations

import threading

from cellama.engine import EngineOptions, EngineStopped, Handle, Pulse, Request
from cellama.engine.core.engine_core import Command, EngineCore
from cellama.engine.fake import FakeBackend, FakePlan
from cellama.engine.system.inbox import Inbox

PATIENCE_S = 30


def new_core() -> tuple[EngineCore, FakeBackend]:
    backend = FakeBackend(n_slots=2)
    return EngineCore(backend, EngineOptions(n_parallel=2, n_batch=64), Pulse("test")), backend


def submitted(core: EngineCore, prompt: str, max_tokens: int = 3) -> Handle:
    request = Request(prompt, tuple(prompt.encode()), max_tokens=max_tokens, ignore_eos=True, submitted_at=0.0)
    handle = Handle(request, lambda _handle, _reason: None, None, plan=FakePlan(request.sampling))
    assert core.inbox.submit(Command("submit", handle))
    return handle


def test_core_generates_a_token_for_every_sequence_in_each_step() -> None:
    core, backend = new_core()
    handles = [submitted(core, "one"), submitted(core, "two", max_tokens=2)]
    assert not core.has_work
    core.step()
    assert core.telemetry.snapshot.slots_decoding == 2
    core.step()
    assert [handle.done for handle in handles] == [False, True]
    core.step()
    assert [handle.done for handle in handles] == [True, True]
    assert not core.has_work
    assert len(backend.batches) == 3


def test_core_without_work_computes_nothing() -> None:
    core, backend = new_core()
    core.step()
    assert backend.batches == []
    handle = submitted(core, "one")
    core.inbox.put(Command("cancelled", handle))
    core.step()
    assert handle.result(0).finish_reason == "cancelled"
    assert backend.batches == []


def test_closing_core_ends_running_requests_and_requests_in_the_inbox() -> None:
    core, backend = new_core()
    running = submitted(core, "one")
    core.step()
    late = submitted(core, "two")
    core.close(EngineStopped("closed"))
    assert [type(handle.future.exception(0)) for handle in (running, late)] == [EngineStopped] * 2
    assert backend.closed
    assert not core.inbox.put(Command("cancelled", late))


def test_inbox_wakes_its_owner_when_it_receives_a_command_or_closes() -> None:
    inbox: Inbox[str] = Inbox()
    taken: list[list[str]] = []
    first = threading.Event()

    def own() -> None:
        while not inbox.is_closed:
            inbox.wait()
            taken.append(inbox.take())
            first.set()

    owner = threading.Thread(target=own)
    owner.start()
    assert inbox.put("one")
    assert first.wait(PATIENCE_S)
    assert inbox.close()
    owner.join(PATIENCE_S)
    assert [command for commands in taken for command in commands] == ["one"]
    assert not inbox.close()


def test_inbox_counts_unfinished_requests_and_accepts_no_requests_after_closing() -> None:
    inbox: Inbox[str] = Inbox()
    assert inbox.submit("one")
    assert inbox.is_busy
    assert inbox.last_submit > 0
    inbox.end()
    inbox.close()
    assert not inbox.submit("two")
    assert not inbox.is_busy
    assert inbox.take() == ["one"]
