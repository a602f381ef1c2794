"""Send messages to the console's chat over HTTP, and read its streams."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import httpx

from ...conftest import PATIENCE_S


class ConsoleChatter:
    """A visitor of the console with one chat."""

    def __init__(self, url: str, **headers: str) -> None:
        self.id = uuid.uuid4().hex
        self.path = f"/console/chat/{self.id}"
        self.http = httpx.Client(base_url=url, headers={"origin": url, **headers}, timeout=PATIENCE_S)
        self.num_turns = 0

    def __enter__(self) -> ConsoleChatter:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def send(self, text: str, **fields: Any) -> httpx.Response:
        body = {"text": text, "model": "tiny", "num_turns": self.num_turns, "temperature": 0, **fields}
        response = self.http.post(f"{self.path}/messages", json=body)
        if response.is_success:
            self.num_turns = response.json()["num_turns"]
        return response

    def events(self, after: int = -1) -> Iterator[dict[str, Any]]:
        """Yield the events of the last answer."""
        with self.http.stream("GET", f"{self.path}/stream?after={after}") as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))

    def answer(self) -> dict[str, Any]:
        """Return the last answer after its end."""
        return list(self.events())[-1]

    def page(self, path: str = "") -> str:
        response = self.http.get(path or self.path, headers={"accept": "text/html"})
        assert response.status_code == 200, response.text
        return response.text
