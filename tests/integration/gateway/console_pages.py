"""Read and operate pages of the console in a browser."""

from __future__ import annotations

import json
from pathlib import Path

from ...browser import Page
from ...conftest import wait_until


def choose_file(page: Page, selector: str, path: Path) -> None:
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    node = page.call("DOM.querySelector", {"nodeId": root, "selector": selector})["nodeId"]
    page.call("DOM.setFileInputFiles", {"nodeId": node, "files": [str(path)]})


def text_of(page: Page, selector: str) -> str:
    """Return the text of the last element that matches."""
    return str(page.run(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.textContent ?? ''"))


def accept_questions(page: Page) -> None:
    """Answer yes to every `confirm` of the page."""
    page.run("window.confirm = () => true")


def wait_for_text(page: Page, selector: str, text: str) -> None:
    wait_until(lambda: text in text_of(page, selector), f"{text!r} in {selector}")
