"""What the pages tell people to type works: their blocks run, on one worker for all pages."""

from __future__ import annotations

import json
import os
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
from .pages import DOCS, ROOT, Block, blocks_of, pages

NOT_RUN = {
    "installs packages": 5,
    "needs a GPU's tools": 1,
    "fetches a model from the hub": 1,
    "a second `cellama up` beside the first one": 1,
    "names a host of yours": 2,
    "names files of yours": 6,
    "takes minutes": 2,
    "needs a reranking model": 1,
    "downloads a test suite": 1,
    "closes the gateway to the other pages": 1,
    "needs pandas and pyarrow": 1,
}
GATEWAY = "http://127.0.0.1:8000"  # where pages have it
STARTED = "cellama up"  # such a line is what the fixtures have done
EXAMPLES = "docs/examples/"
SCRIPT = """
import json, sys
space = {}
for line, text in json.load(sys.stdin):
    exec(compile("\\n" * (line - 1) + text, sys.argv[1], "exec"), space)
"""


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a page's files are; /models of the pages is `models` in it."""
    (tmp_path / "models").mkdir()
    bundled = Path(cellama.engine.bundled.__file__).parent / "tiny.gguf"
    shutil.copy(bundled, tmp_path / "models" / "my-model.gguf")
    return tmp_path


def run(argv: list[str], folder: Path, page: str, stdin: str) -> None:
    """A process that must succeed, with the commands of this environment."""
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
    assert done.returncode == 0, f"{page} says what does not work:\n{done.stdout[-4000:]}"


def write(block: Block, folder: Path, page: str) -> None:
    """A block that is a file: one of ours must be as it is there, others are written for the commands of the page."""
    assert block.title is not None
    if block.title.startswith(EXAMPLES):
        assert block.text == (ROOT / block.title).read_text(encoding="utf-8"), f"{page} shows another {block.title}"
        return
    (folder / block.title).write_text(block.text, encoding="utf-8")
    if block.title == "cellama.toml":
        check = "from cellama.config import get_settings; get_settings()"
        run([sys.executable, "-c", check], folder, page, "")


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_blocks_of_page_run(
    page: Path, worker: WorkerProcess, redis_server: RedisServer, folder: Path, request: pytest.FixtureRequest
) -> None:
    blocks = [block for block in blocks_of(page) if block.reason is None]
    if any(GATEWAY in block.text for block in blocks):
        url = request.getfixturevalue("gateway").url
        blocks = [replace(block, text=block.text.replace(GATEWAY, url)) for block in blocks]
    for block in (block for block in blocks if block.title):
        write(block, folder, name_of(page))
    lines = [line for block in blocks if block.language == "sh" and not block.title for line in block.text.splitlines()]
    commands = [line for line in lines if line.partition("#")[0].strip() != STARTED]
    if commands:
        run(["bash", "-euo", "pipefail", "-v"], folder, name_of(page), "\n".join(commands))
    python = [(block.line, block.text) for block in blocks if block.language == "python" and not block.title]
    if python:
        run([sys.executable, "-c", SCRIPT, name_of(page)], folder, name_of(page), json.dumps(python))


def test_blocks_that_do_not_run_are_few_and_have_reasons() -> None:
    assert Counter(block.reason for page in pages() for block in blocks_of(page) if block.reason) == NOT_RUN


def test_first_command_of_the_readme_stands_near_its_top() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("make demo") <= 25
    assert len(lines) <= 110
    assert (DOCS / "index.md").exists()
