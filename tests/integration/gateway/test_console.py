"""Test the pages of the console over HTTP: access, protection against other sites, and content."""

from __future__ import annotations

import json
import re
from html import unescape
from typing import Any

import httpx
import pytest
from redis import Redis

from cellama.api import Client
from cellama.api.http.console.session import COOKIE
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.events import error
from cellama.tasks.state.ledger import Ledger

from ...conftest import PATIENCE_S, wait_until
from ...gateways import GatewayProcess
from ..ledgers import STARTED, TOKEN, begin, submission, submit, write
from ..test_gateway_tenants import Keyed
from .conftest import HTML, OWN, Visit

HOSTILE = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'


def rows_of(text: str) -> list[str]:
    """Return the job ids in a table of jobs."""
    return re.findall(r'class="mono id" href="[^"]*">([^<]+)<', text)


def test_console_asks_for_a_key_when_the_visitor_has_no_session(visit: Visit) -> None:
    browser = visit()
    for path in ("/console", "/console/jobs?state=failed"):
        answer = browser.get(path)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/console/sign-in?next=/console")
    assert "API key" in browser.get("/console/sign-in").text
    fragment = browser.get("/console/overview", headers={"hx-request": "true"})
    assert (fragment.status_code, fragment.headers["hx-redirect"]) == (401, "/console/sign-in")
    assert browser.get("/console/jobs/x/events", headers={"accept": "text/event-stream"}).status_code == 401


def test_sign_in_starts_a_session_that_scripts_and_other_sites_cannot_use(
    keyed: Keyed, visit: Visit, redis_client: Redis
) -> None:
    key, browser = keyed.add(admin=True), visit()
    answer = browser.post("/console/sign-in", data={"key": f" {key.text}\n", "next": "/console/jobs?state=failed"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs?state=failed")
    cookie = answer.headers["set-cookie"].lower()
    assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/console", "max-age="))
    assert browser.get("/console").status_code == 200
    [stored] = [name for name in redis_client.scan_iter("cellama:console:*") if key.id in str(redis_client.get(name))]
    assert browser.cookies[COOKIE] not in stored.decode()
    assert key.text.rpartition("-")[2] not in str(redis_client.get(stored))
    assert 0 < redis_client.ttl(stored) <= 12 * 3600


def test_sign_in_rejects_a_wrong_key_and_a_return_to_another_site(keyed: Keyed, visit: Visit) -> None:
    browser = visit()
    for wrong in ("", "sk-abc", keyed.add().text[:-1] + "!", HOSTILE):
        answer = browser.post("/console/sign-in", data={"key": wrong})
        assert answer.status_code == 401
        assert "The key is not valid" in answer.text
        assert COOKIE not in browser.cookies
    for elsewhere in ("https://example.org/", "//example.org", "/console/../v1", "/consoles", "/v1"):
        answer = visit().post("/console/sign-in", data={"key": keyed.add().text, "next": elsewhere})
        assert answer.headers["location"] == "/console"


def test_session_ends_when_its_key_is_revoked_or_the_visitor_signs_out(keyed: Keyed, visit: Visit) -> None:
    key = keyed.add()
    browser, other = visit(key), visit(key)
    assert browser.get("/console").status_code == 200
    token = browser.cookies[COOKIE]
    assert browser.post("/console/sign-out").status_code == 303
    assert keyed.process.get("/console", headers={**HTML, "cookie": f"{COOKIE}={token}"}).status_code == 303
    assert other.get("/console").status_code == 200
    keyed.revoke(key)
    assert other.get("/console").status_code == 303


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"},
        {"origin": "https://example.org"},
        {"origin": "null"},
        {},
    ],
)
def test_console_rejects_changes_from_other_sites(keyed: Keyed, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=keyed.process.url, headers={**HTML, **headers}) as browser:
        for path in ("/console/sign-in", "/console/sign-out", "/console/jobs/x/cancel"):
            answer = browser.post(path, data={"key": keyed.add().text})
            assert answer.status_code == 403, path
            assert "only requests from its own pages" in answer.text
    own = {**HTML, "origin": keyed.process.url}
    assert keyed.process.post("/console/sign-in", data={"key": keyed.add().text}, headers=own).status_code == 303


def test_pages_on_other_sites_may_link_to_the_console_but_not_read_it(gateway: GatewayProcess) -> None:
    link = {**HTML, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert gateway.get("/console", headers=link).status_code == 200
    for fetch in ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, {"origin": "https://example.org"}):
        assert gateway.get("/console", headers={**HTML, **fetch}).status_code == 403
    assert gateway.get("/console", headers={"host": "rebound.example.org"}).status_code == 403


def test_each_page_has_a_strict_policy_and_no_inline_scripts_or_styles(gateway: GatewayProcess) -> None:
    for path in ("/console", "/console/overview", "/console/jobs", "/console/jobs/list", "/console/jobs/none"):
        answer = gateway.get(path, headers=HTML)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=|javascript:", answer.text), path
    for name in set(re.findall(r'(?:src|href)="(/console/static/[^"]+)"', gateway.get("/console").text)):
        assert gateway.get(name).status_code == 200


def test_console_is_disabled_by_its_setting(keyed: Keyed, redis_server: RedisServer, tmp_path: Any) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_GATEWAY_CONSOLE="off")
    try:
        gateway.wait_ready("/health")
        assert gateway.get("/console", headers=HTML).status_code == 404
        assert "console:" not in gateway.log()
        assert f"console: {keyed.process.url}/console" in keyed.process.log()
    finally:
        gateway.stop()


def test_overview_shows_models_workers_and_queues(gateway: GatewayProcess, unserved: str) -> None:
    with Client() as client:
        waiting = client.generate(unserved, "Hello", wait=True)
        try:
            wait_until(lambda: unserved in gateway.get("/console/overview").text, "the queue")
            text = gateway.get("/console/overview").text
        finally:
            waiting.cancel()
    assert "no worker" in text
    assert "worker@" in text
    assert re.search(r">tiny</th>\s*<td><span class=\"badge ready\">ready", text)
    assert "Redis memory" in text


def test_only_administrators_see_jobs_of_other_tenants(keyed: Keyed, visit: Visit, queue: Client) -> None:
    keys = {"acme": keyed.add(), "other": keyed.add(), "admin": keyed.add(admin=True)}
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1, "cache_salt": "x"}
    headers = {"authorization": f"Bearer {keys['acme'].text}"}
    keyed.process.post("/v1/completions", json=body, headers=headers).raise_for_status()
    without_tenant = queue.generate("tiny", "Hello", max_tokens=1)
    without_tenant.result(PATIENCE_S)
    seen = {name: rows_of(visit(key).get("/console/jobs").text) for name, key in keys.items()}
    [job_id] = seen["acme"]
    assert seen["other"] == []
    for shown in (job_id, without_tenant.id):
        assert rows_of(visit(keys["admin"]).get("/console/jobs", params={"id": shown}).text) == [shown]
        assert visit(keys["other"]).get("/console/jobs", params={"id": shown}).text.count(shown) == 1  # in the field
    for name, status in (("acme", 200), ("other", 404), ("admin", 200)):
        for path in ("", "/details"):
            assert visit(keys[name]).get(f"/console/jobs/{job_id}{path}").status_code == status
        assert visit(keys[name]).post(f"/console/jobs/{job_id}/cancel").status_code == (303 if status == 200 else 404)
    assert visit(keys["acme"]).get(f"/console/jobs/{without_tenant.id}").status_code == 404
    assert "worker@" not in visit(keys["acme"]).get("/console").text
    assert "worker@" in visit(keys["admin"]).get("/console").text


def test_job_list_filters_by_state_model_kind_and_id(
    gateway: GatewayProcess, queue: Client, redis_client: Redis, unserved: str
) -> None:
    finished = queue.generate("tiny", "Once upon a time", max_tokens=2)
    finished.result(PATIENCE_S)
    waiting, cancelled = (queue.generate(unserved, "Hello", wait=True) for _ in range(2))
    cancelled.cancel()

    def found(**filters: str) -> set[str]:
        ids = {finished.id, waiting.id, cancelled.id}
        return ids & set(rows_of(gateway.get("/console/jobs/list", params=filters).text))

    try:
        assert found(model=unserved) == {waiting.id, cancelled.id}
        assert found(state="waiting", model=unserved) == {waiting.id}
        assert found(state="cancelled") == {cancelled.id}
        assert found(state="succeeded", kind="generate") == {finished.id}
        assert found(state="failed", model=unserved) == found(kind="embed") == set()
        assert found(id=finished.id[4:20]) == found(id=f" {finished.id} ") == {finished.id}
        assert found(id=HOSTILE) == set()
        redis_client.zrem("cellama:ended", finished.id)  # as if 10,000 jobs had ended since
        assert found(id=finished.id) == set()
        assert f'href="/console/jobs/{finished.id}"' in gateway.get("/console/jobs", params={"id": finished.id}).text
        shown = gateway.get("/console/jobs", params={"id": HOSTILE, "model": HOSTILE}).text
        assert "<script>window" not in shown
        assert HOSTILE in unescape(shown)
    finally:
        waiting.cancel()


def test_job_list_filters_10_000_jobs_and_its_pages_include_each_job(
    gateway: GatewayProcess, redis_client: Redis, unserved: str
) -> None:
    ledger = Ledger(redis_client)
    jobs = [submission(f"cellama:queue:{unserved}") for _ in range(10_000)]
    for start in range(0, len(jobs), 1000):
        # So the first jobs are also the earliest, because calls that follow quickly would overlap otherwise.
        ledger.submit(jobs[start : start + 1000], num_following=max(0, 3000 - start))
    try:
        wanted = jobs[-1].job_id
        assert rows_of(gateway.get("/console/jobs/list", params={"id": wanted[:18]}).text) == [wanted]
        assert rows_of(gateway.get("/console/jobs/list", params={"model": unserved, "kind": "chat"}).text) == []
        seen: list[str] = []
        path = f"/console/jobs?model={unserved}&state=waiting"
        for _ in range(3):
            text = gateway.get(path).text
            seen += rows_of(text)
            path = unescape(re.search(r'href="([^"]+)">Next page', text)[1])  # type: ignore[index]
        assert seen == [job.job_id for job in jobs[:150]]
        assert gateway.get("/console/jobs?after=x").status_code == 400
    finally:
        redis_client.delete(f"cellama:waiting:cellama:queue:{unserved}", f"cellama:queue:{unserved}")
        redis_client.delete(f"cellama:queue:{unserved}\x06\x163", *(f"cellama:job:{job.job_id}" for job in jobs))
        redis_client.srem("cellama:queues", f"cellama:queue:{unserved}")


def test_job_page_shows_the_lifecycle_parameters_and_escaped_text(
    gateway: GatewayProcess, queue: Client, unserved: str
) -> None:
    waiting = queue.generate(unserved, HOSTILE, stop=["a"], wait=True)
    text = gateway.get(f"/console/jobs/{waiting.id}").text
    assert "<script>window" not in text
    assert json.dumps(HOSTILE) in unescape(text)
    assert gateway.post(f"/console/jobs/{waiting.id}/cancel", headers=OWN).status_code == 303
    assert re.search(r'class="badge cancelled"[^>]*>cancelled', gateway.get(f"/console/jobs/{waiting.id}").text)
    finished = queue.generate("tiny", "Once upon a time", max_tokens=8, temperature=0)
    result = finished.result(PATIENCE_S)
    text = unescape(gateway.get(f"/console/jobs/{finished.id}").text)
    assert result["text"] in text
    for entry in ("Submitted", "Attempt 1 started", "Got a slot", "First token", "Finished", "prompt of 4 tokens"):
        assert entry in text
    assert gateway.get("/console/jobs/none", headers=HTML).status_code == 404


def test_job_stream_resumes_after_the_last_event_and_stops_when_the_job_ends(
    gateway: GatewayProcess, queue: Client
) -> None:
    job = queue.generate("tiny", "Once upon a time", max_tokens=8, temperature=0)
    result = job.result(PATIENCE_S)
    path = f"/console/jobs/{job.id}/events"
    frames = gateway.get(path).text.strip().split("\n\n")
    events = [json.loads(frame.partition("data: ")[2]) for frame in frames]
    assert "".join(event.get("text", "") for event in events) == result["text"]
    assert events[-1]["is_last"]
    rest = gateway.get(path, headers={"last-event-id": str(events[1]["seq"])}).text
    assert rest.strip().split("\n\n") == frames[2:]
    assert gateway.get(path, params={"after": events[-1]["seq"]}).status_code == 204
    assert gateway.get(path, params={"after": "x"}).status_code == 400


def test_job_page_shows_each_attempt_when_workers_were_lost(
    gateway: GatewayProcess, redis_client: Redis, ledger: Ledger, unserved: str
) -> None:
    queue = f"cellama:queue:{unserved}"
    job_id = submit(ledger, queue)
    write(ledger, begin(ledger, job_id), STARTED, TOKEN)
    again = begin(ledger, job_id, alone=True)  # the first worker has not reported an end
    ledger.hand_back(again)
    last = begin(ledger, job_id, alone=True)
    try:
        text = gateway.get(f"/console/jobs/{job_id}").text
        for entry in ("Attempt 1 started", "Attempt 2 started", "Attempt 3 started", "Attempt 1 lost"):
            assert text.count(entry) == 1, entry
        assert "Attempt 2 handed back" in text
        failure = error("internal", HOSTILE)
        write(ledger, last, failure, seq=2)
        text = gateway.get(f"/console/jobs/{job_id}").text
        assert "Failed" in text
        assert f"{HOSTILE} (internal)" in unescape(text)
        assert "<script>window" not in text
    finally:
        redis_client.srem("cellama:queues", queue)


def test_pages_report_when_redis_does_not_respond(tmp_path: Any) -> None:
    gateway = GatewayProcess(tmp_path, "redis://127.0.0.1:1/0")
    try:
        gateway.wait_ready("/health")
        for path in ("/console", "/console/jobs", "/console/jobs/x"):
            answer = gateway.get(path, headers=HTML)
            assert (answer.status_code, answer.headers["content-type"]) == (503, "text/html; charset=utf-8")
            assert "Redis does not answer" in answer.text
    finally:
        gateway.stop()
