"""Keys and tenants in the console, for administrators, in a browser and over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from cellama.api.keys.entry import KeyText
from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.contract.names import queue_name
from cellama.tasks.state.ledger import Ledger
from cellama.tasks.state.tenants import ServiceWriter

from ...browser import Page, browsing
from ...conftest import PATIENCE_S, empty_database, wait_until
from ...gateways import GatewayProcess
from ..ledgers import submission
from ..test_gateway_tenants import Keyed
from .console_pages import accept_questions, text_of

DATABASE = 10


@pytest.fixture(scope="module")
def gateway(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A gateway without keys, and without a worker."""
    with empty_database(redis_server, DATABASE) as url:
        process = GatewayProcess(tmp_path_factory.mktemp("keys"), url)
        yield process.wait_ready("/health")
        assert process.stop() == 0
        assert "Traceback" not in process.log()
        assert not re.search(r"sk-\w+-\w+", process.log())


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browsing(tmp_path) as browser:
        yield Page(browser)


def secret_in(page: Page) -> str:
    return str(page.run("document.getElementById('secret')?.value ?? ''"))


def test_first_key_is_created_used_and_revoked(gateway: GatewayProcess, page: Page) -> None:
    page.open(f"{gateway.url}/console/keys")
    page.run("document.getElementById('tenant').focus()")
    page.type("acme")
    page.press("Enter")
    secret = wait_until(lambda: secret_in(page), "the secret")
    assert "active" in text_of(page, "[aria-labelledby=keys-title] tbody")
    page.open(f"{gateway.url}/console/keys")  # from now on, the console needs a key
    assert page.run("location.pathname") == "/console/sign-in"
    page.run("document.getElementById('key').focus()")
    page.type(secret)
    page.press("Enter")
    wait_until(lambda: "administrator" in text_of(page, "[aria-labelledby=keys-title] tbody"), "the page of keys")
    assert secret not in page.run("document.documentElement.outerHTML")
    page.run("document.getElementById('tenant').focus()")
    page.type("globex")
    page.press("Enter")
    other = wait_until(lambda: secret_in(page), "the second secret")
    assert gateway.get("/v1/models", headers={"x-api-key": other}).status_code == 200
    page.call("Page.reload")  # which must not send the form again
    wait_until(lambda: not secret_in(page) and text_of(page, "#create-title"), "the page without the secret")
    assert page.run("document.querySelectorAll('[aria-labelledby=keys-title] tbody tr').length") == 2
    accept_questions(page)
    page.run(f"document.querySelector('[aria-label=\"Revoke {other.split('-')[1]}\"]').click()")
    wait_until(lambda: "revoked" in text_of(page, "[aria-labelledby=keys-title] tbody"), "the state")
    assert gateway.get("/v1/models", headers={"x-api-key": other}).status_code == 401
    assert gateway.get("/v1/models", headers={"x-api-key": secret}).status_code == 200


@pytest.fixture(scope="module")
def keyed(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A gateway whose keys are in a file."""
    keyed = Keyed(tmp_path_factory.mktemp("keyed"), redis_server.url)
    keyed.add()
    yield keyed
    assert keyed.process.stop() == 0


def as_owner_of(keyed: Keyed, key: KeyText) -> httpx.Client:
    headers = {"x-api-key": key.text, "origin": keyed.process.url, "accept": "text/html"}
    return httpx.Client(base_url=keyed.process.url, headers=headers, timeout=PATIENCE_S)


def test_only_administrators_see_and_create_keys(keyed: Keyed) -> None:
    keyed.process.wait_ready("/health")
    with as_owner_of(keyed, keyed.add()) as visitor, as_owner_of(keyed, keyed.add(admin=True)) as admin:
        for answer in (
            visitor.get("/console/keys"),
            visitor.post("/console/keys", data={"tenant": "acme", "admin": "on"}),
            visitor.post("/console/keys/aaaaaaaaaaaa/revoke"),
            visitor.get("/console/tenants"),
            visitor.get("/console/tenants/table"),
        ):
            assert answer.status_code == 403
            assert "requires an administrator key" in answer.text
        for path in ("/console/keys", "/console/tenants"):
            assert path not in visitor.get("/console").text
            assert path in admin.get("/console").text


def test_tenants_page_shows_the_jobs_and_share_of_each_tenant(keyed: Keyed, redis_client: Redis, unserved: str) -> None:
    tenant = f"<b>{unserved}"
    Ledger(redis_client).submit([submission(queue_name(unserved), fairness_key=tenant) for _ in range(3)])
    service = ServiceWriter(redis_client)
    service.note(tenant, 12345.0)
    service.flush()
    keyed.process.wait_ready("/health")
    with as_owner_of(keyed, keyed.add(admin=True)) as admin:
        page, part = admin.get("/console/tenants"), admin.get("/console/tenants/table")
        unchanged = admin.get("/console/tenants/table", headers={"if-none-match": part.headers["etag"]})
    row = re.search(rf"<tr>\s*<th[^>]*>&lt;b&gt;{unserved}</th>.*?</tr>", page.text, re.DOTALL)
    assert row is not None
    assert re.findall(r'class="num">([^<]*)<', row[0]) == ["1", "3", "0", "12\u202f345"]
    assert row[0] in part.text
    assert unchanged.status_code == 304


def test_new_key_is_shown_as_a_key_file_entry_when_keys_are_stored_in_a_file(keyed: Keyed) -> None:
    keyed.process.wait_ready("/health")
    key = keyed.add(admin=True, tenant="<b>root".strip("<b>"))
    with as_owner_of(keyed, key) as admin:
        answer = admin.post("/console/keys", data={"tenant": "acme", "concurrent_jobs": "3", "expires_in": "90d"})
        assert answer.status_code == 201
        assert answer.headers["cache-control"] == "no-store"
        assert "concurrent_jobs = 3" in answer.text
        assert "expires_at = " in answer.text
        refused = admin.post(f"/console/keys/{key.id}/revoke")
        assert (refused.status_code, "delete the entry in the file" in refused.text) == (409, True)
        assert key.id in admin.get("/console/keys").text
        assert "sha256:" not in admin.get("/console/keys").text


def test_invalid_fields_are_explained_and_stay_in_the_form(keyed: Keyed) -> None:
    keyed.process.wait_ready("/health")
    with as_owner_of(keyed, keyed.add(admin=True)) as admin:
        for fields, problem in (
            ({"tenant": "<b>"}, "the value must be 1 to 64 letters"),
            ({"tenant": "acme", "expires_in": "soon"}, "use, for example, 30m, 12h, 90d or 4w"),
            ({"tenant": "acme", "tokens_per_minute": "1e3"}, "it must be a whole number"),
            ({"tenant": "acme", "requests_per_minute": "0"}, "greater than or equal to 1"),
        ):
            answer = admin.post("/console/keys", data=fields)
            assert answer.status_code == 400
            assert problem in answer.text
            assert 'id="secret"' not in answer.text
            for text in fields.values():
                assert f'value="{text.replace("<b>", "&lt;b&gt;")}"' in answer.text
