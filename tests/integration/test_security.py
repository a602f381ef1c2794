"""With a Redis that requires TLS and a user with a password, everything works, and the password is never shown."""

from __future__ import annotations

import selectors
import socket
import ssl
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from redis import Redis

from cellama.api.machine.redis_server import RedisServer
from cellama.tasks.connection.connections import broker_options

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment

PASSWORD = "open-sesame"
PRODUCER = """
from cellama.api import Client
with Client() as client:
    job = client.generate("tiny", "Once upon a time", max_tokens=4, temperature=0)
    print("".join(event.get("text", "") for event in job.stream()) == job.result(30)["text"])
"""


class TlsProxy:
    """Terminates TLS in front of a Redis without TLS, as stunnel does."""

    def __init__(self, redis_port: int, authority: trustme.CA) -> None:
        self._redis_port = redis_port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self._context)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        try:
            with (
                self._context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(("127.0.0.1", self._redis_port)) as redis,
            ):
                self._pump(client, redis)
        except OSError:
            return

    @staticmethod
    def _pump(client: ssl.SSLSocket, redis: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(client, selectors.EVENT_READ, redis)
            selector.register(redis, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    source: socket.socket = key.fileobj  # type: ignore[assignment]
                    data = source.recv(65536)
                    while isinstance(source, ssl.SSLSocket) and source.pending():
                        data += source.recv(65536)
                    if not data:
                        return
                    key.data.sendall(data)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def secured_url(tmp_path: Path) -> Iterator[str]:
    """Return a rediss:// URL with a user that has the permissions that cellama needs."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with RedisServer.start(tmp_path / "redis", admin_commands=True) as server:
        with Redis.from_url(server.url) as redis:
            redis.acl_setuser(
                "cellama", enabled=True, passwords=[f"+{PASSWORD}"], keys=["*"], channels=["*"], commands=["+@all"]
            )
            redis.acl_setuser("default", enabled=False)
        proxy = TlsProxy(server.port, authority)
        yield f"rediss://cellama:{PASSWORD}@127.0.0.1:{proxy.port}/0?ssl_ca_certs={tmp_path / 'ca.pem'}"
        proxy.close()


def run(url: str, *argv: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment(CELLAMA_REDIS_URL=url)
    return subprocess.run(argv, env=environment, capture_output=True, timeout=PATIENCE_S, text=True)


def test_jobs_work_over_tls_with_a_user_without_printing_the_password(secured_url: str, tmp_path: Path) -> None:
    worker = WorkerProcess(tmp_path, secured_url, name=uuid.uuid4().hex)
    try:
        worker.wait_ready()
        done = run(secured_url, sys.executable, "-c", PRODUCER)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        status = run(secured_url, sys.executable, "-c", "from cellama.api.cli import main; main()", "status")
        assert "tiny" in status.stdout
    finally:
        code = worker.stop()
    assert code == 0
    assert PASSWORD not in worker.log() + done.stderr + status.stdout + status.stderr


def test_errors_about_a_wrong_password_or_an_untrusted_certificate_hide_the_password(secured_url: str) -> None:
    command = [sys.executable, "-c", "from cellama.api.cli import main; main()", "status"]
    wrong = run(secured_url.replace(PASSWORD, "wrong"), *command)
    untrusted = run(secured_url.partition("?")[0], *command)
    assert wrong.returncode == untrusted.returncode == 3
    assert "cellama:***@127.0.0.1" in wrong.stderr
    assert "certificate verify failed" in untrusted.stderr
    assert PASSWORD not in wrong.stderr + untrusted.stderr
    assert "Traceback" not in wrong.stderr + untrusted.stderr


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ssl.CERT_REQUIRED),
        ("?ssl_cert_reqs=none", ssl.CERT_NONE),
        ("?ssl_cert_reqs=CERT_OPTIONAL", ssl.CERT_OPTIONAL),
    ],
)
def test_certificates_are_verified_unless_the_url_disables_verification(query: str, expected: ssl.VerifyMode) -> None:
    assert broker_options(f"rediss://h/0{query}")["broker_use_ssl"] == {"ssl_cert_reqs": expected}
    assert broker_options(f"redis://h/0{query}")["broker_use_ssl"] is None
