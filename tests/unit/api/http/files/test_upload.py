"""Test uploads to /v1/files: their limits, complete contents, and no leftover files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from cellama.api.http.errors import ApiError
from cellama.api.http.files.upload import MAX_FORM_BYTES, receive_form

LIMIT = 300_000


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    async def take(request: Request) -> Response:
        try:
            async with receive_form(request, tmp_path, LIMIT) as form:
                data = form.path.read_bytes()
                return JSONResponse([form.name, form.fields, form.num_bytes, data.decode()])
        except ApiError as error:
            return JSONResponse(error.envelope, error.status)

    return TestClient(Starlette(routes=[Route("/", take, methods=["POST"])]))


def nothing_stays(folder: Path) -> bool:
    return not list((folder / "incoming").glob("*"))


@pytest.mark.parametrize("size", [0, 1, LIMIT])
def test_receive_form_writes_the_whole_file(client: TestClient, tmp_path: Path, size: int) -> None:
    sent = client.post("/", data={"purpose": "batch"}, files={"file": ("../../etc/a.jsonl", b"x" * size)})
    assert sent.json() == ["a.jsonl", {"purpose": "batch"}, size, "x" * size]
    assert nothing_stays(tmp_path)


PART = b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nxyz\r\n'
FIELD = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%s\r\n'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"no form", 400),
        (PART, 400),  # truncated
        (PART + PART + b"--B--\r\n", 400),
        (FIELD % b"batch" + b"--B--\r\n", 400),
        (FIELD % b"\xff" + PART + b"--B--\r\n", 400),
        (FIELD % (b"x" * (MAX_FORM_BYTES + 1)) + PART + b"--B--\r\n", 413),
        (PART.replace(b'"file"', b'"other"') + b"--B--\r\n", 400),
        (PART.replace(b"xyz", b"x" * (LIMIT + 1)) + b"--B--\r\n", 413),
        (PART.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n") + b"--B--\r\n", 400),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
def test_receive_form_rejects_invalid_forms(
    client: TestClient, tmp_path: Path, body: bytes, status: int, is_chunked: bool
) -> None:
    pieces: Any = (body[at : at + 1000] for at in range(0, len(body), 1000)) if is_chunked else body
    answer = client.post("/", content=pieces, headers={"content-type": "multipart/form-data; boundary=B"})
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert nothing_stays(tmp_path)


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", ""])
def test_receive_form_returns_415_for_other_content_types(client: TestClient, kind: str) -> None:
    assert client.post("/", content=b"{}", headers={"content-type": kind}).status_code == 415
