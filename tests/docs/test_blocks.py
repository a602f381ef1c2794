"""Run the blocks of all pages with one worker, and compare their output with the output on the pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import cellama.engine.bundled
from cellama.api.machine.redis_server import RedisServer

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment
from .pages import DOCS, OUTPUT, ROOT, Block, blocks_of, pages

NOT_RUN = {
    "installs packages": 5,
    "needs a GPU's tools": 1,
    "fetches a model from the hub": 1,
    "a second `cellama up` alongside the first one": 1,
    "needs your own host": 2,
    "needs your own files": 6,
    "takes minutes": 3,
    "it runs until Ctrl-C": 1,
    "needs a reranking model": 1,
    "downloads a test suite": 1,
    "needs pandas": 1,
    "closes the gateway to the other pages": 1,
    "creates a key, and then the gateway of other blocks would require it": 1,
}
GATEWAY = "http://127.0.0.1:8000"  # the gateway's address on the pages
STARTED = "cellama up"  # lines that start services, which the fixtures have already started
EXAMPLES = "docs/examples/"
# Printed before each block, so that the output of a page can be divided.
MARK = "----- block"
SCRIPT = f"""
import json, sys
space = {{}}
for line, text in json.load(sys.stdin):
    print("{MARK}", line, flush=True)
    exec(compile("\\n" * (line - 1) + text, sys.argv[1], "exec"), space)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory for the files of a page, with `models`, which replaces /models of the pages."""
    (tmp_path / "models").mkdir()
    bundled = Path(cellama.engine.bundled.__file__).parent / "tiny.gguf"
    shutil.copy(bundled, tmp_path / "models" / "my-model.gguf")
    return tmp_path


def run(argv: list[str], folder: Path, page: str, stdin: str) -> str:
    """Run a process that must succeed, with the commands of this environment, and return what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = clean_environment(CELLAMA_REDIS_URL=os.environ["CELLAMA_REDIS_URL"], PATH=path, COLUMNS="100")
    done = subprocess.run(
        argv,
        input=stdin.replace("/models/", f"{folder}/models/"),
        cwd=folder,
        env=environment,
        timeout=2 * PATIENCE_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"a block of {page} fails:\n{done.stdout[-4000:]}"
    return done.stdout


def normalized(line: str) -> str:
    """Return a line of output without the parts that differ between runs: numbers, ids, units of size and spacing."""
    line = re.sub(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\b[0-9a-f]{16,}\b", "ID", line)
    line = re.sub(r"\d+(?:[.,:]\d+)*(?: [KMG]iB)?", "0", line)
    return re.sub(r"[\s─━│╭╮╰╯]+", " ", line).strip()


def check_output(expected: Block, printed: str, page: str) -> None:
    """Fail unless each line that the page shows is printed, in this order. `…` stands for any text."""
    lines = iter([normalized(line) for line in printed.splitlines()])
    for line in filter(None, map(normalized, expected.text.splitlines())):
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        assert any(pattern.fullmatch(candidate) for candidate in lines), (
            f"{page}:{expected.line}: this line is shown, but not printed there:\n{line}\nprinted:\n{printed[-4000:]}"
        )


def check_outputs(blocks: list[Block], printed: dict[int, str], page: str) -> None:
    """Compare each `OUTPUT` block with what the runnable block above it has printed."""
    source = None
    for block in blocks:
        if block.title == OUTPUT:
            assert source is not None, f"{page}:{block.line}: no block above this one is run"
            check_output(block, printed[source.line], page)
        elif not block.title and block.language in ("sh", "python"):
            source = block if block.reason is None else None


def by_block(printed: str) -> dict[int, str]:
    """Divide the output of a page by the lines that its blocks start at."""
    parts = re.split(rf"^{MARK} (\d+)\n", printed, flags=re.MULTILINE)
    return {int(line): text for line, text in zip(parts[1::2], parts[2::2], strict=True)}


def write(block: Block, folder: Path, page: str) -> None:
    """Write the file that a block shows. If the file is one of the examples, the block must match it instead."""
    assert block.title is not None
    if block.title.startswith(EXAMPLES):
        assert block.text == (ROOT / block.title).read_text(encoding="utf-8"), f"{page} shows another {block.title}"
        return
    (folder / block.title).write_text(block.text, encoding="utf-8")
    if block.title == "cellama.toml":
        check = "from cellama.config import get_settings; get_settings()"
        run([sys.executable, "-c", check], folder, page, "")


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_code_blocks_on_the_page_run_without_errors(
    page: Path, worker: WorkerProcess, redis_server: RedisServer, folder: Path, request: pytest.FixtureRequest
) -> None:
    blocks = blocks_of(page)
    if any(GATEWAY in block.text for block in blocks):
        url = request.getfixturevalue("gateway").url
        blocks = [replace(block, text=block.text.replace(GATEWAY, url)) for block in blocks]
    run_blocks = [block for block in blocks if block.reason is None and block.title != OUTPUT]
    for block in run_blocks:
        if block.title:
            write(block, folder, name_of(page))
    printed = {}
    commands = [block for block in run_blocks if block.language == "sh" and not block.title]
    if commands:
        lines = []
        for block in commands:
            lines.append(f"echo; echo {MARK} {block.line}")
            lines += [line for line in block.text.splitlines() if line.partition("#")[0].strip() != STARTED]
        printed |= by_block(run(["bash", "-euo", "pipefail"], folder, name_of(page), "\n".join(lines)))
    python = [(block.line, block.text) for block in run_blocks if block.language == "python" and not block.title]
    if python:
        printed |= by_block(
            run([sys.executable, "-c", SCRIPT, name_of(page)], folder, name_of(page), json.dumps(python))
        )
    check_outputs(blocks, printed, name_of(page))


def test_skipped_blocks_are_few_and_have_reasons() -> None:
    assert Counter(block.reason for page in pages() for block in blocks_of(page) if block.reason) == NOT_RUN


def test_readme_shows_its_first_command_near_the_top() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("make demo") <= 25
    assert len(lines) <= 110
    assert (DOCS / "index.md").exists()
