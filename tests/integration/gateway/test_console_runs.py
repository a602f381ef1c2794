"""Bulk runs in the console: upload, progress, errors, cancellation and downloads, in a browser and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.state.bulk_runs import Batches

from ...browser import Page
from ...conftest import PATIENCE_S, WorkerProcess, wait_until
from ...gateways import GatewayProcess
from ..test_gateway_tenants import Keyed
from .console_chats import ConsoleChatter
from .console_pages import accept_questions, choose_file, text_of
from .test_batches import request

ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture
def http(gateway: GatewayProcess) -> Iterator[httpx.Client]:
    headers = {"origin": gateway.url, "accept": "text/html"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=PATIENCE_S) as client:
        yield client


def lines_of(*requests: dict[str, Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in requests).encode()


def start_run(client: httpx.Client, content: bytes, name: str = "in.jsonl") -> str:
    """Upload a file, and return the path of its run."""
    response = client.post("/console/runs", files={"file": (name, content)}, data={"completion_window": "1h"})
    assert response.status_code == 303, response.text
    return response.headers["location"]


def upload(page: Page, gateway: GatewayProcess, path: Path) -> None:
    page.open(f"{gateway.url}/console/runs")
    choose_file(page, "#file", path)
    page.run("document.getElementById('start').click()")


def status_of(page: Page) -> str:
    return text_of(page, "#run .badge")


def num_ended(page: Page) -> int:
    return int(page.run("document.querySelector('#run progress')?.value ?? 0"))


def test_run_of_1000_lines_is_uploaded_watched_and_downloaded(
    gateway: GatewayProcess, http: httpx.Client, page: Page, tmp_path: Path
) -> None:
    requests = [request(number, max_tokens=2) for number in range(999)] + [request(999, temperature="hot")]
    (tmp_path / "orders.jsonl").write_bytes(lines_of(*requests))
    upload(page, gateway, tmp_path / "orders.jsonl")
    wait_until(lambda: "/runs/batch_" in page.run("location.pathname"), "the page of the run")
    seen = {wait_until(lambda: num_ended(page), "the progress")}
    wait_until(lambda: seen.add(num_ended(page)) or status_of(page) == "completed", "the end of the run")
    assert len(seen) > 2
    wait_until(lambda: "Download output" in text_of(page, "#run"), "the results")
    assert "temperature is 'hot'" in text_of(page, "#run")
    path = page.run("location.pathname")
    output, errors, sent = (http.get(f"{path}/{name}") for name in ("output", "errors", "input"))
    assert len(output.text.splitlines()) == 999
    assert [json.loads(line)["custom_id"] for line in errors.text.splitlines()] == ["r999"]
    assert sent.content == (tmp_path / "orders.jsonl").read_bytes()
    assert "orders-output.jsonl" in output.headers["content-disposition"]
    assert output.headers["x-content-type-options"] == "nosniff"
    assert page.run("document.querySelector('[hx-trigger]')") is None  # an ended run is not polled


def test_cancelled_run_keeps_finished_results(
    gateway: GatewayProcess, worker: WorkerProcess, page: Page, tmp_path: Path
) -> None:
    short = [request(number, max_tokens=2) for number in range(10)]
    long = [request(number, max_tokens=1500, ignore_eos=True) for number in range(10, 200)]
    (tmp_path / "long.jsonl").write_bytes(lines_of(*short, *long))
    with worker.slowed(0.1):
        upload(page, gateway, tmp_path / "long.jsonl")
        wait_until(lambda: num_ended(page) > 0, "the first results")
        assert status_of(page) == "in progress"
        assert (
            'hx-select="#lists"' in gateway.get("/console/runs", headers={"accept": "text/html"}).text
        )  # it is polled
        accept_questions(page)
        page.run("document.querySelector('#run button.danger').click()")
        wait_until(lambda: status_of(page) == "cancelled", "the end of the run")
    wait_until(lambda: "Download output" in text_of(page, "#run"), "the results")
    assert page.run("document.querySelector('#run button')") is None


def test_rejected_upload_shows_the_remedy_next_to_the_field(
    gateway: GatewayProcess, http: httpx.Client, page: Page, tmp_path: Path
) -> None:
    (tmp_path / "notes.md").write_text("<b>Hello</b>\n")
    upload(page, gateway, tmp_path / "notes.md")
    wait_until(lambda: page.text("problem"), "the problem")
    assert "or JSON lines with custom_id, method, url and body" in page.text("problem")
    assert page.run("document.getElementById('file').files.length") == 1
    refused = http.post("/console/runs", files={"file": ("notes.md", b"<b>Hello</b>\n")})  # without the script
    assert refused.status_code == 400
    assert "&lt;b&gt;Hello" in refused.text
    other = lines_of({**request(1), "url": "/v1/images"})
    assert "must be one of /v1/chat/completions" in http.post("/console/runs", files={"file": ("a", other)}).text
    assert "file is empty" in http.post("/console/runs", files={"file": ("a", b"")}).text


def test_invalid_lines_are_listed(http: httpx.Client) -> None:
    path = start_run(http, lines_of(request(1), request(1)), "<i>twice.jsonl")
    wait_until(lambda: "The file was not run" in http.get(path).text, "the end of the run")
    text = http.get(path).text
    assert "is also used in line 1; make it unique" in text
    assert "&lt;i&gt;twice.jsonl" in text
    assert http.get(f"{path}/output").status_code == 404
    assert http.post(f"{path}/cancel").status_code == 409
    assert path in http.get("/console/runs").text


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")])
def test_pages_of_chats_runs_tenants_and_keys_are_accessible_and_fit_each_screen_size(
    gateway: GatewayProcess, http: httpx.Client, page: Page, worker: WorkerProcess, width: int, scheme: str
) -> None:
    run = start_run(http, lines_of(*(request(number, max_tokens=2) for number in range(30)), request(30, top_k=-2)))
    wait_until(lambda: "Download errors" in http.get(run).text, "the end of the run")
    refused = start_run(http, lines_of(request(1), request(1)))
    with ConsoleChatter(gateway.url) as chatter:
        chatter.send("Tell a story about foxes", system="Be brief")
        chatter.answer()
        paths = {"chat": chatter.path, "runs": "/console/runs", "run": run, "refused": refused, "keys": "/console/keys"}
        paths["tenants"] = "/console/tenants"
        page.show_as(width, scheme)
        for name, path in paths.items():
            page.open(gateway.url + path)
            check_page(page, f"console-{name}-{width}-{scheme}")
        with worker.slowed(0.1):
            chatter.send("Tell another story")
            page.open(gateway.url + chatter.path)
            wait_until(lambda: text_of(page, ".answer"), "the first words")
            page.run("document.querySelector('.settings').open = true")
            check_page(page, f"console-running-{width}-{scheme}")
        chatter.http.post(f"{chatter.path}/delete")


def check_page(page: Page, name: str) -> None:
    page.screenshot(name)
    assert page.violations() == [], name
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), name


def test_table_rows_are_converted_to_requests(http: httpx.Client) -> None:
    table = b"id,title,review\nr1,Tea,Small\nr2,Lunch,Loud\n"
    fields = {"model": "tiny", "template": "Sum up {title}: {review}", "system": "Be brief", "max_tokens": "3"}
    started = http.post("/console/runs", files={"file": ("reviews.csv", table)}, data=fields)
    assert started.status_code == 303, started.text
    path = started.headers["location"]
    wait_until(lambda: "Download output" in http.get(path).text, "the end of the run")
    sent = [json.loads(line) for line in http.get(f"{path}/input").text.splitlines()]
    assert [line["body"]["messages"][1]["content"] for line in sent] == ["Sum up Tea: Small", "Sum up Lunch: Loud"]
    output = [json.loads(line) for line in http.get(f"{path}/output").text.splitlines()]
    assert {line["custom_id"] for line in output} == {"r1", "r2"}
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 3 for line in output)
    refused = http.post("/console/runs", files={"file": ("reviews.csv", table)}, data={"model": "tiny"})
    assert (refused.status_code, "template is empty" in refused.text) == (400, True)


def test_command_line_runs_are_listed_for_administrators(http: httpx.Client, redis_client: Redis) -> None:
    batches = Batches(redis_client)
    batches.write("run-1", state="in_progress", input="<b>a.csv", output="b.csv", model="tiny", total=7, finished=3)
    try:
        text = http.get("/console/runs").text
        assert "&lt;b&gt;a.csv" in text
        assert "3 / 7" in text
    finally:
        batches.forget("run-1")


def test_runs_are_visible_only_to_their_tenant_and_administrators(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    keyed = Keyed(tmp_path, redis_server.url)
    keys = [keyed.add(), keyed.add(), keyed.add(admin=True)]
    keyed.process.wait_ready("/health")
    own, other, admin = (
        httpx.Client(
            base_url=keyed.process.url,
            headers={"x-api-key": key.text, "origin": keyed.process.url, "accept": "text/html"},
            timeout=PATIENCE_S,
        )
        for key in keys
    )
    with own, other, admin:
        path = start_run(own, lines_of(request(1)))
        assert own.get(path).status_code == admin.get(path).status_code == 200
        assert other.get(path).status_code == 404
        assert other.post(f"{path}/cancel").status_code == 404
        assert path not in other.get("/console/runs").text
        assert "cellama batch run" not in other.get("/console/runs").text
        wait_until(lambda: "Download output" in own.get(path).text, "the end of the run")
        assert own.get(f"{path}/output").status_code == 200
        assert other.get(f"{path}/output").status_code == 404
    assert keyed.process.stop() == 0
