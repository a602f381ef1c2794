"""Build the documentation site, which loads nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from .pages import ROOT


def test_site_builds_in_strict_mode_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / ".ci" / "site.py"), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > 30
    for path, text in pages.items():
        assert "<!-- include:" not in text, f"{path} does not contain the file that it includes"
        assert not re.search(r'<(?:script|img|link)[^>]+(?:src|href)="(?:https?:)?//', text), path
