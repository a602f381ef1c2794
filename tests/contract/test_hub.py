"""Tests of models from the hub: the real huggingface_hub client and a local server with the hub's HTTP API."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from cellama.engine import EngineOptions, HubOptions, ModelLoadFailed, ModelManager
from cellama.engine.bundled import TINY_PATH
from cellama.engine.models.sources import resolve

REPO = "org/tiny-GGUF"
COMMIT = "0" * 39 + "1"
TOKEN = "hf_secret"


class Hub:
    """The files of the server, and the requests that it received."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.checksums: dict[str, str] = {}
        self.needs_token = False
        self.cut_after: int | None = None  # the connection breaks after this many bytes of the next download
        self.downloads: list[tuple[str, str | None]] = []  # file and Range header

    def add(self, name: str, data: bytes, checksum: str | None = None) -> None:
        self.files[name] = data
        self.checksums[name] = checksum or hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.hub.needs_token and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "RepoNotFound", "Invalid credentials")
        if path.startswith(f"api/models/{REPO}/tree/main"):
            listing = [{"type": "file", "path": n, "size": len(d), "oid": "1"} for n, d in self.hub.files.items()]
            return self._send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
        prefix = f"{REPO}/resolve/"
        if not path.startswith(prefix):
            return self._refuse(404, "RepoNotFound", "Repository not found")
        revision, _, name = path.removeprefix(prefix).partition("/")
        if revision not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound", "Revision not found")
        if name not in self.hub.files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        return self._file(name)

    def _file(self, name: str) -> None:
        data, etag = self.hub.files[name], f'"{self.hub.checksums[name]}"'
        headers = {"X-Repo-Commit": COMMIT, "ETag": etag, "X-Linked-Etag": etag, "Accept-Ranges": "bytes"}
        headers["X-Linked-Size"] = str(len(data))
        if self.command == "HEAD":
            return self._send(200, data, headers)
        byte_range = self.headers.get("Range")
        self.hub.downloads.append((name, byte_range))
        start = int(byte_range.removeprefix("bytes=").split("-")[0]) if byte_range else 0
        if byte_range:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut, self.hub.cut_after = self.hub.cut_after, None
        return self._send(206 if byte_range else 200, data[start:], headers, cut_after=cut)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(self, status: int, data: bytes, headers: dict[str, str], cut_after: int | None = None) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:cut_after])
        if cut_after is not None:
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def options(tmp_path: Path) -> HubOptions:
    return HubOptions(cache_dir=str(tmp_path / "hub"))


def with_(options: HubOptions, **changes: Any) -> HubOptions:
    return HubOptions(**{"cache_dir": options.cache_dir, **changes})


def test_model_from_the_hub_is_loaded_and_cached(hub: Hub, options: HubOptions) -> None:
    hub.add("tiny.gguf", TINY_PATH.read_bytes())
    manager = ModelManager()
    try:
        engine_options = EngineOptions(n_parallel=1, threads=1)
        model = manager.load(None, f"hf://{REPO}/tiny.gguf", options=engine_options, hub=options)
        assert model.id == "tiny"
        assert model.engine.generate("Once upon a time", max_tokens=4, temperature=0) == ", there was a"
    finally:
        manager.close()
    assert resolve(f"hf://{REPO}/tiny.gguf@main", options).read_bytes() == TINY_PATH.read_bytes()
    assert len(hub.downloads) == 1
    resolve(f"hf://{REPO}/tiny.gguf", with_(options, force=True))
    assert len(hub.downloads) == 2
    assert resolve(f"hf://{REPO}/tiny.gguf", with_(options, offline=True)).exists()


def test_pattern_selects_its_only_match_or_all_parts_of_a_split_model(hub: Hub, options: HubOptions) -> None:
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "README.md"):
        hub.add(name, b"GGUF" + name.encode())
    for part in (1, 2, 3):
        hub.add(f"big-{part:05d}-of-00003.gguf", b"GGUF" + bytes([part]))
    assert resolve(f"hf://{REPO}/*Q4_K_M*", options).name == "m-Q4_K_M.gguf"
    first = resolve(f"hf://{REPO}/big*", options)
    assert first.name == "big-00001-of-00003.gguf"
    assert sorted(path.name for path in first.parent.glob("big*")) == [f"big-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    with pytest.raises(ModelLoadFailed, match=r"matches several files of .*: m-Q4_K_M\.gguf, m-Q8_0\.gguf; choose one"):
        resolve(f"hf://{REPO}/m-*", options)
    with pytest.raises(ModelLoadFailed, match=r"matches no GGUF file of .*: big-00001-of-00003\.gguf, m-Q4"):
        resolve(f"hf://{REPO}/*Q2*", options)
    with pytest.raises(ModelLoadFailed, match="requires the Hub's list of files"):
        resolve(f"hf://{REPO}/*Q2*", with_(options, offline=True))


def test_interrupted_download_resumes(hub: Hub, options: HubOptions) -> None:
    data = b"GGUF" + bytes(range(256)) * 80_000  # several of the client's chunks of 10 MB
    hub.add("m.gguf", data)
    hub.cut_after = 12_000_000
    assert resolve(f"hf://{REPO}/m.gguf", options).read_bytes() == data
    (_, first), (_, second) = hub.downloads
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").split("-")[0]) > 0


def test_file_with_a_wrong_checksum_is_rejected_and_deleted(hub: Hub, options: HubOptions) -> None:
    hub.add("m.gguf", b"GGUF damaged", checksum="a" * 64)
    with pytest.raises(ModelLoadFailed, match=r"was damaged during the download: its SHA-256 is \w+ instead of a{64}"):
        resolve(f"hf://{REPO}/m.gguf", options)
    hub.add("m.gguf", b"GGUF whole")
    assert resolve(f"hf://{REPO}/m.gguf", options).read_bytes() == b"GGUF whole"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"hf://{REPO}/nothing.gguf", f"{REPO} has no file 'nothing.gguf'"),
        ("hf://org/nothing/m.gguf", "org/nothing does not exist on the hub, or is private"),
        (f"hf://{REPO}/m.gguf@v9", f"{REPO} has no revision 'v9'"),
        (f"hf://{REPO}", "does not name a file on the Hub; use hf://ORG/REPO/FILE.gguf"),
    ],
)
def test_error_names_the_missing_repository_revision_or_file(
    hub: Hub, options: HubOptions, source: str, message: str
) -> None:
    hub.add("m.gguf", b"GGUF")
    with pytest.raises(ModelLoadFailed, match=message.replace(".", r"\.")):
        resolve(source, options)


def test_token_grants_access_and_never_appears_in_errors(hub: Hub, options: HubOptions) -> None:
    hub.add("m.gguf", b"GGUF")
    hub.needs_token = True
    with pytest.raises(ModelLoadFailed, match="set HF_TOKEN") as refused:
        resolve(f"hf://{REPO}/m.gguf", with_(options, token="hf_wrong"))
    allowed = with_(options, token=TOKEN)
    assert resolve(f"hf://{REPO}/m.gguf", allowed).exists()
    assert "hf_wrong" not in str(refused.value)
    assert TOKEN not in repr(allowed)


def test_unreachable_hub_raises_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch, options: HubOptions) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    for name in ("m.gguf", "*Q8_0*"):
        with pytest.raises(ModelLoadFailed, match=r"can't be downloaded: http://127.0.0.1:9 is unreachable ") as away:
            resolve(f"hf://{REPO}/{name}", options)
        assert "copy the file to this machine and use its path" in str(away.value)
    with pytest.raises(ModelLoadFailed, match="can't be downloaded: it is not in the cache"):
        resolve(f"hf://{REPO}/m.gguf", with_(options, offline=True))
