"""Read the streams of the example sites in a real browser, whose EventSource reconnects automatically."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from cellama.api import Client

from ..browser import Browser, Page, browsing
from ..conftest import PATIENCE_S, WorkerProcess, wait_until
from .sites import FORM, Site

# A page that never closes its EventSource.
NAIVE = """
window.seen = []
window.source = new EventSource(%s)
for (const name of ["started", "token", "done", "failed"])
    source.addEventListener(name, (event) => seen.push([name, event.lastEventId]))
"""


class CuttableProxy:
    """A TCP proxy that can cut all open connections."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                browser, _ = self._socket.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._open |= {browser, server}
                for source, target in ((browser, server), (server, browser)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # cut
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()

    def close(self) -> None:
        self._socket.close()
        self.cut()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser: Browser) -> Page:
    return Page(browser)


@contextlib.contextmanager
def cuttable(site: Site) -> Iterator[CuttableProxy]:
    proxy = CuttableProxy(site.port)
    try:
        yield proxy
    finally:
        proxy.close()


def story_of(page: Page) -> str:
    """Return the id of the job whose events the page reads."""
    return page.streams[0][0].split("/")[2]


def statuses(page: Page) -> list[int]:
    return [status for _, status in page.streams]


def test_fastapi_page_shows_each_token_once_when_its_stream_is_interrupted(
    fastapi_site: Site, page: Page, worker: WorkerProcess
) -> None:
    with cuttable(fastapi_site) as proxy, Client() as client:
        page.open(proxy.url)
        with worker.slowed(0.3):
            page.run("document.forms[0].requestSubmit()")
            wait_until(lambda: len(page.text("story")) > 20, "the first words")
            job_id = story_of(page)
            proxy.cut()
            wait_until(lambda: page.text("state") == "reconnecting …", "the cut in the page")
            page.screenshot("fastapi-cut")
            assert client.position(job_id).state == "running"  # the cut has hit a running stream
            wait_until(lambda: statuses(page) == [200, 200], "the second connection")
        wait_until(lambda: page.text("state") == "finished: length", "the end in the page")
        page.screenshot("fastapi-finished")
        assert page.text("story") == "Once upon a time" + client.result(job_id, PATIENCE_S)["text"]
        assert [message["eventId"] for message in page.messages] == [str(seq) for seq in range(len(page.messages))]
        assert page.messages[-1]["eventName"] == "done"
        assert page.run("source.readyState") == 2  # closed by the page: no further connection


def test_fastapi_page_shows_the_error_of_a_failed_story(fastapi_site: Site, page: Page) -> None:
    page.open(f"http://127.0.0.1:{fastapi_site.port}")
    page.run("document.forms[0].elements.prompt.value = 'fox '.repeat(9000), document.forms[0].requestSubmit()")
    wait_until(lambda: page.text("state").startswith("the story failed: "), "the failure in the page")
    page.screenshot("fastapi-failed")
    assert "tokens" in page.text("state")
    assert [page.messages[-1]["eventName"], statuses(page)] == ["failed", [200]]
    assert page.run("source.readyState") == 2


def test_fastapi_page_reports_a_rejected_stream(fastapi_site: Site, page: Page) -> None:
    page.open(f"http://127.0.0.1:{fastapi_site.port}")
    page.run("follow('no such job')")
    wait_until(lambda: page.text("state") == "the server has refused the stream", "the refusal in the page")
    assert statuses(page) == [404]


def submit(site: Site, name: str, fields: dict[str, Any]) -> str:
    """Queue a story and return the id of its job."""
    if name == "django":
        status, text = site.request("/stories", urlencode(fields), **FORM)
    else:
        status, text = site.request("/stories", fields)
    assert status == 200, text
    return str(json.loads(text)["id"])


@pytest.fixture(params=["fastapi", "django"])
def site(request: pytest.FixtureRequest) -> tuple[str, Site]:
    return request.param, request.getfixturevalue(f"{request.param}_site")


def test_event_source_receives_each_event_once_and_stops_even_if_the_page_never_closes_it(
    site: tuple[str, Site], page: Page, worker: WorkerProcess
) -> None:
    name, server = site
    with cuttable(server) as proxy, Client() as client:
        page.open(f"{proxy.url}/no-such-page")  # a page with the same origin
        with worker.slowed(0.3):
            job_id = submit(server, name, {"prompt": "Once upon a time"})
            page.run(NAIVE % json.dumps(f"/stories/{job_id}/events"))
            wait_until(lambda: len(page.messages) > 3, "the first words")
            proxy.cut()
            wait_until(lambda: page.run("source.readyState") == 0, "the cut in the page")
            assert client.position(job_id).state == "running"
            wait_until(lambda: statuses(page) == [200, 200], "the second connection")
        wait_until(lambda: page.run("source.readyState") == 2, "the end of the EventSource")
        assert statuses(page) == [200, 200, 204]  # the browser reconnects once after the end, receives 204, and stops
        seen = page.run("seen")
        events = list(client.stream(job_id, timeout=PATIENCE_S))
        assert seen == [[event["type"], str(event["seq"])] for event in events]


def test_event_source_receives_the_failure_once_and_stops(site: tuple[str, Site], page: Page) -> None:
    name, server = site
    page.open(f"http://127.0.0.1:{server.port}/no-such-page")
    job_id = submit(server, name, {"prompt": "fox " * 9000})
    page.run(NAIVE % json.dumps(f"/stories/{job_id}/events"))
    wait_until(lambda: page.run("source.readyState") == 2, "the end of the EventSource")
    assert statuses(page) == [200, 204]
    assert [kind for kind, _ in page.run("seen")] == ["failed"]


@pytest.mark.parametrize("wrong", ["abc", "1.5", "-7", "9" * 30])
def test_site_rejects_an_invalid_last_event_id(site: tuple[str, Site], wrong: str) -> None:
    name, server = site
    job_id = submit(server, name, {"prompt": "Hi"})
    status, text = server.request(f"/stories/{job_id}/events", **{"last-event-id": wrong})
    assert (status, json.loads(text)["code"]) == (400, "invalid_request")
