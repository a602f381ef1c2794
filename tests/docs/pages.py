"""Find the pages of the documentation and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCKS_TESTED_ELSEWHERE = {DOCS / "canvas.md"}  # run by tests/integration/test_canvas.py
RUNNABLE = {"sh", "python", "toml"}  # blocks in all other languages (text, json, yaml) only show something
EXAMPLE = "Example"  # title of a block with output that depends on the load, which is not compared
OUTPUT = "Output"  # title of a block with what the nearest `sh` or `python` block above it prints
_GENERATED = re.compile(r"^<!-- generated: .*?^<!-- end of generated part -->$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r'^(?P<indent> *)```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced code block.

    `title` is the name of the file that the block shows, or `OUTPUT`. `reason` is the reason for not running the block.
    """

    language: str
    text: str
    line: int
    title: str | None = None
    reason: str | None = None


def pages() -> list[Path]:
    """Return the README and all pages of docs/ that have blocks."""
    found = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in found if page not in BLOCKS_TESTED_ELSEWHERE and blocks_of(page)]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that readers can run. Signatures in generated parts are left out."""
    text = _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), page.read_text(encoding="utf-8"))
    blocks = [
        Block(m["language"], dedent(m["text"]), text[: m.start("text")].count("\n") + 1, m["title"], m["reason"])
        for m in _FENCE.finditer(text)
    ]
    return [block for block in blocks if block.title != EXAMPLE and (block.language in RUNNABLE or block.title)]
