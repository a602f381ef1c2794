"""What `cellama status` shows of workers."""

from __future__ import annotations

from rich.console import Console

from cellama.api.cli.status import _workers


def test_status_shows_the_threads_in_use_and_none_of_a_model_that_is_loading() -> None:
    ready = {"id": "reader", "default": True, "threads": 7, "engine": None}
    loading = {"id": "writer", "default": False, "engine": None}
    console = Console(width=120, record=True)
    console.print(_workers([{"name": "w@host", "pid": 1, "models": [ready, loading]}]))
    shown = console.export_text()
    rows = {words[-8]: words[-7] for line in shown.splitlines() if (words := line.replace("│", " ").split())[-7:-6]}
    assert "threads" in shown
    assert (rows["(default)"], rows["writer"]) == ("7", "-")
