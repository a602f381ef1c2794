"""Run Flower with a link to the monitoring dashboard (`board_url`).

`python -m cellama.api.machine.flower` accepts the options of `celery flower`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from celery.__main__ import main as celery
from flower.urls import settings
from tornado.template import Loader, Template

from cellama.config import get_settings

BAR, LIST_END = "navbar.html", "</ul>"  # the link becomes the last entry of the navigation bar
LINK = (
    '<li class="nav-item"><a class="nav-link" target="_blank" rel="noopener" '
    "href=\"{{ handler.settings['board_url'] }}\">Board</a></li>"
)


class LinkedTemplates(Loader):
    """Loads Flower's templates, and adds the dashboard's link to the navigation bar."""

    def _create_template(self, name: str) -> Template:
        source = (Path(self.root) / name).read_text(encoding="utf-8")
        return Template(source.replace(LIST_END, LINK + LIST_END, 1) if name == BAR else source, name=name, loader=self)


def main() -> None:
    """Run Flower until it is stopped."""
    if (board_url := get_settings().board_url) is not None:
        settings.update(template_loader=LinkedTemplates(settings["template_path"]), board_url=board_url)
    sys.argv = ["celery", "-A", "cellama.tasks.app", "flower", *sys.argv[1:]]
    celery()


if __name__ == "__main__":
    main()
