"""Test files and batches over HTTP: the separation of tenants, and the limits of the gateway."""

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
    """Reads the caller from a header. The tenant "acme" may only use the model tiny."""

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        tenant = headers.get("x-tenant")
        return Caller(tenant, models=frozenset({"tiny"}) if tenant == "acme" else None)


@pytest.fixture
def start(url: str, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a gateway without workers."""
    with contextlib.ExitStack() as running:

        def start(**settings: Any) -> TestClient:
            app = create_app(settings_for(url, tmp_path, **settings), access=Tenants())
            return running.enter_context(TestClient(app))

        yield start


def upload(client: TestClient, data: bytes, who: Mapping[str, str] = ACME, **fields: Any) -> Any:
    sent = {"purpose": "batch", **fields}
    return client.post("/v1/files", data=sent, files={"file": ("in.jsonl", data)}, headers=dict(who))


def create_batch(client: TestClient, data: bytes, who: Mapping[str, str] = ACME, **headers: str) -> Any:
    file_id = upload(client, data, who).json()["id"]
    return create_batch_of(client, file_id, who, **headers)


def create_batch_of(client: TestClient, file_id: str, who: Mapping[str, str] = ACME, **headers: str) -> Any:
    body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
    return client.post("/v1/batches", json=body, headers={**who, **headers})


def errors_of(client: TestClient, created: Any, who: Mapping[str, str] = ACME) -> list[tuple[str, int | None]]:
    """Return codes and lines of the errors of a batch that fails."""
    path = f"/v1/batches/{created.json()['id']}"

    def has_failed() -> Any:
        batch = client.get(path, headers=dict(who)).json()
        return batch if batch["status"] == "failed" else None

    batch = wait_until(has_failed, "the end of the batch")
    return [(error["code"], error["line"]) for error in batch["errors"]["data"]]


def test_files_and_batches_of_a_tenant_return_404_to_other_tenants(start: Start) -> None:
    client = start()
    created = create_batch(client, lines_of([request("a")]))
    assert created.status_code == 200, created.text
    batch_id, file_id = created.json()["id"], created.json()["input_file_id"]
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{batch_id}"):
        assert client.get(path, headers=ACME).status_code == 200
        assert client.get(path, headers=OTHER).status_code == 404
        assert client.get(path).status_code == 404  # without a tenant
    assert client.delete(f"/v1/files/{file_id}", headers=OTHER).status_code == 404
    assert client.post(f"/v1/batches/{batch_id}/cancel", headers=OTHER).status_code == 404
    assert create_batch_of(client, file_id, OTHER).status_code == 404
    for path in ("/v1/files", "/v1/batches"):
        assert len(client.get(path, headers=ACME).json()["data"]) == 1
        assert client.get(path, headers=OTHER).json()["data"] == []
    assert client.post(f"/v1/batches/{batch_id}/cancel", headers=ACME).status_code == 200


def test_batch_rejects_models_that_its_key_may_not_use(start: Start) -> None:
    client = start()
    data = lines_of([request("a"), request("b", model="large")])
    assert errors_of(client, create_batch(client, data)) == [("model_not_allowed", 2)]


def test_settings_limit_file_size_lines_and_open_batches(start: Start) -> None:
    client = start(gateway_max_file_bytes=2000, gateway_max_batch_lines=2, gateway_open_batches=1)
    assert upload(client, b"x" * 2000).status_code == 200
    assert upload(client, b"x" * 2001).status_code == 413
    three = lines_of([request(custom_id) for custom_id in "abc"])
    assert errors_of(client, create_batch(client, three)) == [("too_many_requests", None)]
    wait_until(lambda: create_batch(client, lines_of([request("a")])).status_code == 200, "room for another batch")
    full = create_batch(client, lines_of([request("a")]))
    assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_batches")
    assert int(full.headers["retry-after"]) > 0
    assert create_batch(client, lines_of([request("a")]), OTHER).status_code == 200


def test_repeated_request_with_same_idempotency_key_returns_the_same_batch(start: Start) -> None:
    client = start(gateway_batches_at_once=0)
    file_id = upload(client, lines_of([request("a")])).json()["id"]
    first, again = (create_batch_of(client, file_id, **{"idempotency-key": "k"}) for _ in range(2))
    assert first.json()["id"] == again.json()["id"]
    other = upload(client, lines_of([request("b")])).json()["id"]
    refused = create_batch_of(client, other, **{"idempotency-key": "k"})
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
def test_upload_error_names_the_invalid_field(start: Start, fields: dict[str, str], param: str) -> None:
    answer = upload(start(), b"{}", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_id_returns_404_when_it_is_part_of_another_redis_key(start: Start) -> None:
    client = start(gateway_batches_at_once=0)
    assert create_batch(client, lines_of([request("a")]), {}).status_code == 200
    for path in ("/v1/files/of:", "/v1/files/of:/content", "/v1/batches/of:"):
        assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("query", "status"), [("limit=0", 400), ("limit=101", 400), ("order=up", 400), ("after=x", 404)]
)
def test_list_request_is_rejected_when_its_query_is_invalid(start: Start, query: str, status: int) -> None:
    assert start().get(f"/v1/batches?{query}", headers=ACME).status_code == status


def test_files_return_503_while_their_store_is_unavailable(start: Start, tmp_path: Path) -> None:
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


def test_upload_is_rejected_when_it_exceeds_the_tenants_quota(start: Start, tmp_path: Path) -> None:
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


def test_upload_is_rejected_before_its_body_when_declared_size_exceeds_quota(start: Start) -> None:
    client = start(gateway_tenant_file_bytes=2000)
    headers = {**ACME, "content-type": "multipart/form-data; boundary=x", "content-length": "1000000"}
    assert refused(client.post("/v1/files", content=iter([]), headers=headers))
