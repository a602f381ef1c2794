"""A headless Chromium that a test drives through its DevTools protocol, without a further package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import queue
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from .conftest import CACHE, PATIENCE_S, wait_until

SCREENSHOTS = Path(__file__).parents[1] / "build" / "screenshots"  # kept: look at them
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--window-size=900,500",
    "--remote-debugging-pipe",  # commands come in through descriptor 3, replies go out through 4
)


class Page:
    """A tab. `messages` are its server-sent events, `streams` path and status of each request for such events."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = browser.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self.messages: list[dict[str, Any]] = []
        self.streams: list[tuple[str, int]] = []
        browser.pages[self._session] = self
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")
        self._emulate_focus(True)  # otherwise, the next page that is opened would hide this one

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        return self._browser.call(method, params, self._session)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """Take an event of the protocol."""
        if method == "Network.eventSourceMessageReceived":
            self.messages.append(params)
        elif method == "Network.responseReceived" and params["type"] == "EventSource":
            self.streams.append((urlsplit(params["response"]["url"]).path, params["response"]["status"]))

    def open(self, url: str) -> None:
        self.call("Page.navigate", {"url": url})
        wait_until(lambda: self.run("document.readyState") == "complete", "the page")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        told = self.call("Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def text(self, element_id: str) -> str:
        return str(self.run(f"document.getElementById({json.dumps(element_id)}).textContent"))

    def press(self, key: str, text: str = "") -> None:
        """Press a key of the keyboard, such as Tab or Enter."""
        code = {"Enter": 13, "Tab": 9, " ": 32}.get(key, 0)
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text or {"Enter": "\r"}.get(key, "")}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown" if params["text"] else "rawKeyDown", **params})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **params})

    def type(self, text: str) -> None:
        """Type a text into the element that has the focus."""
        self.call("Input.insertText", {"text": text})

    def show_as(self, width: int, scheme: str = "light") -> None:
        """Show the page on a screen of this width in CSS pixels, in the colour scheme light or dark."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)
        preferred = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", {"features": [preferred]})

    def violations(self) -> list[str]:
        """Return the rules of accessibility that the page violates, with the first element that does."""
        self.run(axe_source() + "; 0")
        found = self.run("axe.run().then(({violations}) => violations.map((v) => [v.id, v.nodes[0].html]))")
        return [f"{rule}: {element}" for rule, element in found]

    def hide(self) -> None:
        """Open another tab in front of the page."""
        self._emulate_focus(False)
        Page(self._browser)
        wait_until(lambda: self.run("document.hidden"), "a hidden page")

    def bring_to_front(self) -> None:
        """Show the page again after `hide`."""
        self.call("Page.bringToFront")
        wait_until(lambda: not self.run("document.hidden"), "a visible page")

    def _emulate_focus(self, enabled: bool) -> None:
        self.call("Emulation.setFocusEmulationEnabled", {"enabled": enabled})

    def screenshot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


def axe_source() -> str:
    """The script of axe-core, which npm fetches once. Skips the test if that is not possible."""
    found = CACHE / "axe.min.js"
    if not found.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", "--pack-destination", str(CACHE), "axe-core@4"]
        try:
            name = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=PATIENCE_S).strip()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"axe-core is not available, because npm can't fetch it: {error}")
        with tarfile.open(CACHE / name) as package:
            source = package.extractfile("package/axe.min.js")
            assert source is not None
            found.write_bytes(source.read())
    return found.read_text()


class Browser:
    """The process."""

    def __init__(self, folder: Path) -> None:
        (ins, commands), (replies, outs) = os.pipe(), os.pipe()
        ins, outs = (fcntl.fcntl(old, fcntl.F_DUPFD, 10) for old in (ins, outs))  # not 3 and 4, which they become
        argv = ["chromium", *FLAGS, f"--user-data-dir={folder / 'chromium'}"]
        with (folder / "chromium.log").open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", f'exec "$@" 3<&{ins} 4>&{outs}', "bash", *argv],
                pass_fds=(ins, outs),
                stdout=log,
                stderr=log,
            )
        os.close(ins)
        os.close(outs)
        self._commands, self._replies = os.fdopen(commands, "wb"), os.fdopen(replies, "rb")
        self._ids = itertools.count(1)
        self._waiting: dict[int, queue.Queue[Any]] = {}
        self.pages: dict[str, Page] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> Any:
        """Send a command and return its result."""
        number = next(self._ids)
        reply = self._waiting[number] = queue.Queue()
        command = {"id": number, "method": method, "params": params or {}}
        self._commands.write(json.dumps(command if session is None else {**command, "sessionId": session}).encode())
        self._commands.write(b"\0")
        self._commands.flush()
        told = reply.get(timeout=PATIENCE_S)
        assert "error" not in told, (method, told)
        return told["result"]

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._replies.fileno(), 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for told in map(json.loads, messages):
                if "id" in told:
                    self._waiting.pop(told["id"]).put(told)
                elif (page := self.pages.get(told.get("sessionId"))) is not None:
                    page.heard(told["method"], told["params"])


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser for the length of a `with` block."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.process.terminate()
        browser.process.wait(PATIENCE_S)
