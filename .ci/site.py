"""Build the documentation site with Zensical, and fail on a dead link or anchor.

    .venv/bin/python .ci/site.py [DIRECTORY]    # writes DIRECTORY/site; default: build

Zensical reads `.ci/mkdocs.yml` and needs pages and configuration in one directory, so the pages are copied first, and
the files that they include are inserted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).resolve().parents[1]


def build(directory: Path) -> int:
    """Build the site into `directory`/site and return Zensical's exit code."""
    pages = directory / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("__pycache__"))
    for page in pages.rglob("*.md"):
        page.write_text(reference.page_for_site(page.read_text(encoding="utf-8")), encoding="utf-8")
    config = directory / "mkdocs.yml"
    shutil.copy(ROOT / ".ci" / "mkdocs.yml", config)
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run([zensical, "build", "--clean", "--strict", "--config-file", config], check=False).returncode


if __name__ == "__main__":
    sys.exit(build((Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build").resolve()))
