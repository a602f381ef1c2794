"""The chat in a real browser, while its worker is killed, its page reloaded and its gateway restarted."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer

from ...browser import Browser, Page
from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from .console_pages import text_of, wait_for_text

STORY = "Tell a story about foxes"
STEP_S = 0.3  # of a slowed worker, so that no answer ends before something is killed


@pytest.fixture
def page(browser: Browser) -> Page:
    page = Page(browser)
    page.show_as(1280)
    return page


def open_chat(page: Page, url: str, model: str = "tiny") -> None:
    page.open(f"{url}/console/chat")
    page.run(f"document.getElementById('model').value = {json.dumps(model)}")


def send(page: Page, text: str) -> None:
    """Write a message into the field, which has the focus, and press Enter."""
    wait_until(lambda: page.run("document.activeElement.id") == "text", "the focus in the field")
    page.type(text)
    page.press("Enter")


def answer_of(page: Page) -> str:
    return text_of(page, ".turn .answer")


def state_of(page: Page) -> str:
    return str(page.run("document.getElementById('chat').dataset.state"))


def wait_for_end(page: Page) -> None:
    wait_until(lambda: state_of(page) == "idle", "the end of the answer", 2 * PATIENCE_S)


def longer(page: Page, than: str) -> Callable[[], bool]:
    return lambda: len(answer_of(page)) > len(than)


def test_answer_can_be_requested_stopped_and_repeated_using_only_the_keyboard(
    gateway: GatewayProcess, worker: WorkerProcess, page: Page
) -> None:
    open_chat(page, gateway.url)
    with worker.slowed(STEP_S):
        send(page, STORY)
        wait_until(lambda: answer_of(page), "the first words")
        assert page.run("document.title") == f"{STORY} · cellama"
        assert page.run("location.pathname").startswith("/console/chat/")
        page.press("Escape")
        wait_for_text(page, ".turn .note", "You stopped this answer.")
    assert page.run("document.activeElement.id") == "text"
    assert answer_of(page)
    page.press("Tab")
    assert page.run("document.activeElement.id") == "retry"
    page.press("Enter")
    wait_until(lambda: "The end." in answer_of(page) or text_of(page, ".turn .tokens"), "the second answer")
    wait_for_end(page)
    assert page.run("document.querySelectorAll('#turns .turn').length") == 1


def test_answer_continues_when_the_page_is_reloaded(gateway: GatewayProcess, worker: WorkerProcess, page: Page) -> None:
    open_chat(page, gateway.url)
    with worker.slowed(STEP_S):
        send(page, STORY)
        wait_until(lambda: len(answer_of(page)) > 10, "the first words")
        before, path = answer_of(page), page.run("location.pathname")
        page.open(gateway.url + path)
        assert state_of(page) == "running"  # the reload has hit a running answer
        wait_until(longer(page, before), "further words")
        assert answer_of(page).startswith(before)
        page.type("a draft")
        page.open(gateway.url + path)
        assert page.run("document.getElementById('text').value") == "a draft"
    wait_for_end(page)
    shown = answer_of(page)
    page.open(gateway.url + path)
    assert answer_of(page) == shown


def test_answer_continues_when_its_worker_is_killed(
    gateway: GatewayProcess, redis_server: RedisServer, page: Page, tmp_path: Path
) -> None:
    model = f"frail-{uuid.uuid4().hex[:8]}"
    models = json.dumps([{"id": model, "source": "bundled://tiny", "n_parallel": 2, "threads": 1}])

    def start(name: str) -> WorkerProcess:
        (tmp_path / name).mkdir()
        worker = WorkerProcess(tmp_path / name, redis_server.url, name=name, CELLAMA_MODELS=models)
        return worker.wait_ready()

    first = start("w1")
    with first.slowed(STEP_S):
        wait_until(lambda: model in gateway.get("/v1/models").text, "the model")
        open_chat(page, gateway.url, model)
        send(page, STORY)
        wait_until(lambda: len(answer_of(page)) > 10, "the first words")
        assert state_of(page) == "running"
        first.process.kill()
        first.process.wait()
    before = answer_of(page)
    wait_until(lambda: "worker" in page.text("wait"), "the notice")
    second = start("w2")
    try:
        wait_for_end(page)
        assert answer_of(page).startswith(before)
        assert len(answer_of(page)) > len(before)
        assert page.text("wait") == ""
    finally:
        second.stop()
        first.redis.close()


def test_answer_continues_when_the_gateway_restarts(
    redis_server: RedisServer, worker: WorkerProcess, page: Page, tmp_path: Path
) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url).wait_ready()
    try:
        open_chat(page, gateway.url)
        with worker.slowed(STEP_S):
            send(page, STORY)
            wait_until(lambda: len(answer_of(page)) > 10, "the first words")
            before = answer_of(page)
            gateway.process.kill()
            gateway.process.wait(PATIENCE_S)
            wait_for_text(page, "#wait", "The connection to the gateway is lost.")
            gateway = GatewayProcess(tmp_path, redis_server.url, port=gateway.port).wait_ready()
            wait_until(longer(page, before), "further words")
        wait_for_end(page)
        assert answer_of(page).startswith(before)
        with Client() as client:
            wait_until(lambda: not client.jobs("tiny"), "the end of the only job")
    finally:
        gateway.stop()


def test_message_stays_in_the_field_when_it_is_rejected(gateway: GatewayProcess, page: Page) -> None:
    open_chat(page, gateway.url)
    page.run("document.getElementById('model').append(new Option('gone', 'gone', true, true))")
    send(page, "Hello there")
    wait_until(lambda: page.text("problem"), "the problem")
    assert "'gone' is not served; running models: " in page.text("problem")
    assert page.run("document.getElementById('text').value") == "Hello there"
    assert page.run("document.getElementById('turns').children.length") == 0
    page.run("document.getElementById('model').value = 'tiny'")
    page.press("Enter")
    wait_until(lambda: answer_of(page), "the answer")
    assert page.text("problem") == ""


def test_screen_readers_receive_sentences_instead_of_tokens(
    gateway: GatewayProcess, worker: WorkerProcess, page: Page
) -> None:
    open_chat(page, gateway.url)
    page.run(
        "window.heard = [], new MutationObserver(() => heard.push(document.getElementById('spoken').textContent))"
        ".observe(document.getElementById('spoken'), {childList: true})"
    )
    with worker.slowed(0.05):
        send(page, STORY)
        wait_for_end(page)
    heard = page.run("heard")
    assert heard[0] == "tiny is answering."
    assert heard[-1].endswith("End of the answer.")
    assert len(heard) < 20
    assert all(text.rstrip().endswith((".", "!", "?", '"')) for text in heard)
    assert (
        page.run("document.querySelectorAll('#turns [aria-live], #turns [role=status], #turns [role=log]').length") == 0
    )
