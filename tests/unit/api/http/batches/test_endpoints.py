"""Files and batches over HTTP: each tenant has its own, within the gateway's limits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cellama.api.http import create_app
from cellama.api.http.auth import Caller, NoKeys

from .....conftest import wait_until
from .world import CHAT, lines_of, request, settings_for

ACME, OTHER = {"x-tenant": "acme"}, {"x-tenant": "other"}
Start = Callable[..., TestClient]


class Tenants(NoKeys):
    """Who it is says a header; whoever is "acme" may ask for the model tiny alone."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        tenant = headers.get("x-tenant")
        return Caller(tenant, models=frozenset({"tiny"}) if tenant == "acme" else None)


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a gateway without workers."""
    with contextlib.ExitStack() as running:

        def start(**settings: Any) -> TestClient:
            app = create_app(settings_for(url, tmp_path, **settings), access=Tenants())
            return running.enter_context(TestClient(app))

        yield start


def upload(client: TestClient, data: bytes, who: Mapping[str, str] = ACME, **fields: Any) -> Any:
    sent = {"purpose": "batch", **fields}
    return client.post("/v1/files", data=sent, files={"file": ("in.jsonl", data)}, headers=dict(who))


def begin(client: TestClient, data: bytes, who: Mapping[str, str] = ACME, **headers: str) -> Any:
    file_id = upload(client, data, who).json()["id"]
    return begin_with(client, file_id, who, **headers)


def begin_with(client: TestClient, file_id: str, who: Mapping[str, str] = ACME, **headers: str) -> Any:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return client.post("/v1/batches", json=body, headers={**who, **headers})


def errors_of(client: TestClient, begun: Any, who: Mapping[str, str] = ACME) -> list[tuple[str, int | None]]:
    """Of a batch that fails."""
    path = f"/v1/batches/{begun.json()['id']}"

    def has_failed() -> Any:
        batch = client.get(path, headers=dict(who)).json()
        return batch if batch["status"] == "failed" else None

    batch = wait_until(has_failed, "the end of the batch")
    return [(error["code"], error["line"]) for error in batch["errors"]["data"]]


def test_what_one_tenant_has_is_not_there_for_others(start: Start) -> None:
    client = start()
    begun = begin(client, lines_of([request("a")]))
    assert begun.status_code == 200, begun.text
    batch_id, file_id = begun.json()["id"], begun.json()["input_file_id"]
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
        assert client.get(path, headers=ACME).status_code == 200
        assert client.get(path, headers=OTHER).status_code == 404
        assert client.get(path).status_code == 404  # without a tenant
    assert client.delete(f"/v1/files/{file_id}", headers=OTHER).status_code == 404
    assert client.post(f"/v1/batches/{batch_id}/cancel", headers=OTHER).status_code == 404
    assert begin_with(client, file_id, OTHER).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert len(client.get(path, headers=ACME).json()["data"]) == 1
        assert client.get(path, headers=OTHER).json()["data"] == []
    assert client.post(f"/v1/batches/{batch_id}/cancel", headers=ACME).status_code == 200


def test_models_of_a_key_are_those_of_its_batches(start: Start) -> None:
    client = start()
    data = lines_of([request("a"), request("b", model="large")])
    assert errors_of(client, begin(client, data)) == [("model_not_allowed", 2)]


def test_settings_bound_files_lines_and_open_batches(start: Start) -> None:
    client = start(gateway_max_file_bytes=2000, gateway_max_batch_lines=2, gateway_open_batches=1)
    assert upload(client, b"x" * 2000).status_code == 200
    assert upload(client, b"x" * 2001).status_code == 413
    three = lines_of([request(custom_id) for custom_id in "abc"])
    assert errors_of(client, begin(client, three)) == [("too_many_requests", None)]
    wait_until(lambda: begin(client, lines_of([request("a")])).status_code == 200, "room for another batch")
    full = begin(client, lines_of([request("a")]))
    assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_batches")
    assert int(full.headers["retry-after"]) > 0
    assert begin(client, lines_of([request("a")]), OTHER).status_code == 200


def test_batch_that_is_asked_for_again_with_its_key_is_the_same(start: Start) -> None:
    client = start(gateway_batches_at_once=0)
    file_id = upload(client, lines_of([request("a")])).json()["id"]
    first, again = (begin_with(client, file_id, **{"idempotency-key": "k"}) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    other = upload(client, lines_of([request("b")])).json()["id"]
    refused = begin_with(client, other, **{"idempotency-key": "k"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "vision"}, "purpose"),
        ({"colour": "red"}, "colour"),
        ({"expires_after": "soon"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, "expires_after"),
        ({"expires_after[seconds]": "3600"}, "expires_after"),
    ],
)
def test_form_with_a_wrong_field_is_refused_by_its_name(start: Start, fields: dict[str, str], param: str) -> None:
    answer = upload(start(), b"{}", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_id_that_is_part_of_another_key_is_not_there(start: Start) -> None:
    client = start(gateway_batches_at_once=0)
    assert begin(client, lines_of([request("a")]), {}).status_code == 200
    for path in ("/v1/files/of:", "/v1/files/of:/content", "/v1/batches/of:"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("query", "status"), [("limit=0", 400), ("limit=101", 400), ("order=up", 400), ("after=x", 404)]
)
def test_page_that_can_not_be_is_refused(start: Start, query: str, status: int) -> None:
    assert start().get(f"/v1/batches?{query}", headers=ACME).status_code == status


def test_files_are_unavailable_while_their_place_is(start: Start, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no directory")
    answer = upload(start(gateway_files_dir=str(tmp_path / "taken")), b"{}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "files_unavailable")
    assert str(tmp_path) not in answer.text


def refused(answer: Any) -> bool:
    if answer.status_code != 429:
        return False
    assert answer.json()["error"]["code"] == "file_quota_exceeded"
    assert answer.headers["x-should-retry"] == "false"
    return True


def test_upload_beyond_the_quota_of_its_tenant_is_refused(start: Start, tmp_path: Path) -> None:
    client = start(gateway_tenant_file_bytes=2000, gateway_tenant_files=3)
    first = upload(client, b"x" * 900).json()["id"]
    upload(client, b"x" * 900)
    assert refused(upload(client, b"x" * 300))
    assert upload(client, b"x" * 900, OTHER).status_code == 200
    assert upload(client, b"x" * 200).status_code == 200
    assert refused(upload(client, b"")) or refused(upload(client, b"x"))
    client.delete(f"/v1/files/{first}", headers=ACME)
    assert upload(client, b"x" * 900).status_code == 200
    assert len(list((tmp_path / "data" / "gateway" / "files").glob("file-*"))) == 4
    assert not list((tmp_path / "data" / "gateway" / "work" / "incoming").iterdir())


def test_upload_that_is_too_large_for_the_quota_is_refused_before_it_comes(start: Start) -> None:
    client = start(gateway_tenant_file_bytes=2000)
    headers = {**ACME, "content-type": "multipart/form-data; boundary=x", "content-length": "1000000"}
    assert refused(client.post("/v1/files", content=iter([]), headers=headers))
