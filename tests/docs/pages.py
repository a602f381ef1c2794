"""The pages that people read, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN_ELSEWHERE = {DOCS / "canvas.md"}  # beside a worker of the user's own: tests/integration/test_canvas.py
RUNNABLE = {"sh", "python", "toml"}  # all others show something: text, json, yaml
_GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of generated part -->$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `reason` says why it is not run, `title` which file it is."""

    language: str
    text: str
    line: int
    title: str | None = None
    reason: str | None = None


def pages() -> list[Path]:
    """Those whose blocks run: the README and all of docs/."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in found if page not in RUN_ELSEWHERE and blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that claim to work. Signatures in its generated parts don't."""
    text = _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), page.read_text(encoding="utf-8"))
    blocks = [
        Block(m["language"], m["text"], text[: m.start("text")].count("\n") + 1, m["title"], m["reason"])
        for m in _FENCE.finditer(text)
    ]
    return [block for block in blocks if block.language in RUNNABLE or block.title]
