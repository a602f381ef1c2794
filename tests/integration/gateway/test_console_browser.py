"""Use the console in a real browser: with a mouse, with the keyboard only, on a narrow screen, and during outages."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from cellama.api import Client
from cellama.api.machine.redis_server import RedisServer

from ...browser import Browser, Page
from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from ..conftest import LONG
from ..test_gateway_tenants import Keyed

HOSTILE = '<script>window.hacked = 1</script><img src="x" onerror="window.hacked = 1">'
STORY = "Once upon a time"


def text_of(page: Page, selector: str = "main") -> str:
    return str(page.run(f"document.querySelector({selector!r})?.innerText ?? ''"))


def fits(page: Page) -> bool:
    """Return whether the page does not scroll sideways."""
    return bool(page.run("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")])
def test_pages_are_accessible_and_fit_each_screen_size(
    page: Page,
    gateway: GatewayProcess,
    keyed: Keyed,
    queue: Client,
    unserved: str,
    width: int,
    scheme: str,
) -> None:
    finished = queue.generate("tiny", STORY, max_tokens=30, temperature=0)
    finished.result(PATIENCE_S)
    waiting = queue.generate(unserved, "Hello", wait=True)
    paths = {
        "overview": f"{gateway.url}/console",
        "jobs": f"{gateway.url}/console/jobs",
        "job": f"{gateway.url}/console/jobs/{finished.id}",
        "waiting": f"{gateway.url}/console/jobs/{waiting.id}",
        "error": f"{gateway.url}/console/jobs/none",
        "sign-in": f"{keyed.process.url}/console/sign-in",
    }
    page.show_as(width, scheme)
    try:
        for name, url in paths.items():
            page.open(url)
            page.screenshot(f"console-{name}-{width}-{scheme}")
            assert page.violations() == [], name
            assert fits(page), name
    finally:
        waiting.cancel()
    is_dark = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert is_dark == (scheme == "dark")


def test_job_list_is_filtered_while_the_visitor_types(
    page: Page, gateway: GatewayProcess, queue: Client, unserved: str
) -> None:
    jobs = [queue.generate(unserved, "Hello", wait=True) for _ in range(3)]
    try:
        page.open(f"{gateway.url}/console/jobs?model={unserved}")
        assert all(job.id in text_of(page) for job in jobs)
        page.run("document.getElementById('id').focus(), window.before = document.body")
        page.type(jobs[1].id[:23])
        wait_until(lambda: jobs[0].id not in text_of(page), "the filtered list")
        assert jobs[1].id in text_of(page)
        assert page.run("window.before === document.body")  # without loading the page again
        assert page.run("document.activeElement.id") == "id"
        jobs[1].cancel()
        wait_until(lambda: "cancelled" in text_of(page, "tbody"), "the new state")
    finally:
        for job in jobs:
            job.cancel()


def test_job_is_followed_live_and_its_text_is_complete_after_a_reload(
    page: Page, gateway: GatewayProcess, queue: Client, worker: WorkerProcess
) -> None:
    with worker.slowed(0.3):
        job = queue.generate("tiny", STORY, **{**LONG, "max_tokens": 200})
        page.open(f"{gateway.url}/console/jobs/{job.id}")
        wait_until(lambda: len(text_of(page, "pre.text")) > 20, "the first words")
        assert text_of(page, "#stream-state") == "live"
        wait_until(lambda: "Got a slot" in text_of(page, ".timeline"), "the timeline")
        page.call("Page.reload")
        wait_until(lambda: len(text_of(page, "pre.text")) > 40, "more words")
        assert queue.position(job.id).state == "running"
    wait_until(lambda: text_of(page, "#stream-state") == "finished", "the end")
    wait_until(lambda: "First token" in text_of(page, ".timeline"), "the whole timeline")
    assert page.run("document.querySelector('pre.text').textContent") == job.result(PATIENCE_S)["text"]
    assert page.run("document.querySelector('form[data-confirm]')") is None
    assert text_of(page, ".head .badge") == "succeeded"


def test_stream_and_overview_resume_after_a_restart_of_the_gateway(
    page: Page, browser: Browser, queue: Client, worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url)
    overview = Page(browser)
    try:
        gateway.wait_ready()
        overview.open(f"{gateway.url}/console")
        with worker.slowed(1):
            job = queue.generate("tiny", STORY, **{**LONG, "max_tokens": 200})
            page.open(f"{gateway.url}/console/jobs/{job.id}")
            wait_until(lambda: len(text_of(page, "pre.text")) > 10, "the first words")
            gateway.process.kill()
            gateway.process.wait(PATIENCE_S)
            wait_until(lambda: text_of(page, "#stream-state").startswith("reconnecting"), "the outage")
            wait_until(lambda: "does not answer" in text_of(overview, "#connection"), "the notice")
            assert queue.position(job.id).state == "running"
            gateway = GatewayProcess(tmp_path, redis_server.url, gateway.port).wait_ready()
            wait_until(lambda: text_of(page, "#stream-state") == "live", "the stream")
            assert queue.position(job.id).state == "running"
        wait_until(lambda: text_of(page, "#stream-state") == "finished", "the end")
        assert page.run("document.querySelector('pre.text').textContent") == job.result(PATIENCE_S)["text"]
        wait_until(lambda: overview.run("document.getElementById('connection').hidden"), "the end of the notice")
    finally:
        gateway.stop()


def test_hidden_page_does_not_poll_and_is_updated_when_shown(
    page: Page, gateway: GatewayProcess, queue: Client, unserved: str
) -> None:
    page.open(f"{gateway.url}/console/jobs?model={unserved}")
    page.run("window.polls = 0, document.addEventListener('htmx:before:request', () => window.polls++), 0")
    every = "document.querySelector('[hx-trigger]').dispatchEvent(new CustomEvent('every')), window.polls"
    assert page.run(every) == 1
    page.hide()
    job = queue.generate(unserved, "Hello", wait=True)
    try:
        assert page.run(every) == 1
        assert job.id not in text_of(page)
        page.bring_to_front()
        wait_until(lambda: job.id in text_of(page), "the new job")
    finally:
        job.cancel()


def test_page_does_not_receive_an_unchanged_list_again(
    page: Page, gateway: GatewayProcess, queue: Client, unserved: str
) -> None:
    page.open(f"{gateway.url}/console/jobs?model={unserved}")
    page.run(
        "window.statuses = [], document.addEventListener('htmx:after:request', "
        "(event) => window.statuses.push(event.detail.ctx.response.status)), 0"
    )
    wait_until(lambda: page.run("window.statuses.includes(304)"), "an unchanged list")
    assert page.run("window.statuses[0]") == 200
    assert "No job matches" in text_of(page)
    job = queue.generate(unserved, "Hello", wait=True)
    try:
        wait_until(lambda: job.id in text_of(page), "the new job")
    finally:
        job.cancel()


def test_hidden_job_page_closes_its_stream_and_resumes_it_when_shown(
    page: Page, gateway: GatewayProcess, queue: Client, worker: WorkerProcess
) -> None:
    with worker.slowed(0.3):
        job = queue.generate("tiny", STORY, **{**LONG, "max_tokens": 200})
        page.open(f"{gateway.url}/console/jobs/{job.id}")
        wait_until(lambda: len(text_of(page, "pre.text")) > 20, "the first words")
        page.hide()
        last_seq = page.run("lastSeq")
        assert len(list(islice(queue.stream(job.id, last_seq), 4))) == 4
        assert queue.position(job.id).state == "running"
        assert page.run("[lastSeq, source.readyState]") == [last_seq, 2]  # closed
        page.bring_to_front()
    wait_until(lambda: text_of(page, "#stream-state") == "finished", "the end")
    assert page.run("document.querySelector('pre.text').textContent") == job.result(PATIENCE_S)["text"]


@pytest.mark.parametrize("is_live", [True, False])
def test_markup_in_model_output_is_shown_as_text(
    page: Page, gateway: GatewayProcess, queue: Client, worker: WorkerProcess, is_live: bool
) -> None:
    params: dict[str, Any] = {"json_schema": {"const": HOSTILE}, "max_tokens": 120}
    if is_live:
        with worker.slowed(0.1):
            job = queue.generate("tiny", HOSTILE, **params)
            page.open(f"{gateway.url}/console/jobs/{job.id}")
            wait_until(lambda: text_of(page, "#stream-state") == "finished", "the end of the stream")
    else:
        job = queue.generate("tiny", HOSTILE, **params)
        job.result(PATIENCE_S)
        page.open(f"{gateway.url}/console/jobs/{job.id}")
    assert "<script>window.hacked" in job.result(PATIENCE_S)["text"]
    assert page.run("document.querySelector('pre.text').textContent") == job.result(PATIENCE_S)["text"]
    assert page.run("[window.hacked ?? null, document.querySelectorAll('main img, main script').length]") == [None, 0]


def test_visitor_can_sign_in_and_cancel_a_job_using_only_the_keyboard(
    page: Page,
    keyed: Keyed,
    queue: Client,
    unserved: str,
) -> None:
    job = queue.generate(unserved, "Hello", wait=True)

    def tab_to(label: str) -> None:
        focused = "(document.activeElement.innerText || document.activeElement.value || '').trim()"
        for _ in range(40):
            page.press("Tab")
            if page.run(focused) == label:
                return
        pytest.fail(f"the Tab key does not reach {label!r}")

    def wait_for_focus_in_key_field() -> None:
        """Browsers apply `autofocus` only when they render the page, which is after its text can be read."""
        wait_until(lambda: page.run("document.activeElement.id") == "key", "the focus in the field of the key")

    page.open(f"{keyed.process.url}/console/jobs")
    wait_for_focus_in_key_field()
    page.type("sk-wrong")
    page.press("Enter")
    wait_until(lambda: "The key is not valid" in text_of(page), "the refusal")
    wait_for_focus_in_key_field()
    page.type(keyed.add(admin=True).text)
    page.press("Enter")
    wait_until(lambda: job.id in text_of(page), "the jobs")  # the page that was asked for
    tab_to("Skip to content")
    tab_to(job.id)
    page.press("Enter")
    wait_until(lambda: "Waits for a worker" in text_of(page), "the job")
    page.run("window.confirm = (question) => { window.asked = question; return true; }")
    tab_to("Cancel job")
    page.press("Enter")
    wait_until(lambda: text_of(page, ".head .badge") == "cancelled", "the cancellation")
    assert queue.position(job.id).finish_reason == "cancelled"
    tab_to("Sign out")
    page.press("Enter")
    wait_until(lambda: "API key" in text_of(page), "the form")
