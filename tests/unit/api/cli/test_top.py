"""What `cellama top` shows: what is late first, on one screen."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from cellama.api.cli.screen.tables import screen
from cellama.api.client.registry_views import COUNTED

ENGINE = {
    "slots_prefilling": 1, "slots_decoding": 7, "slots_total": 8, "requests_waiting": 3, "generation_rate": 80.0,
    "kv_used_tokens": 96, "kv_total_tokens": 100, "cache_hits": 1, "cache_misses": 3, "preemptions": 2,
    "requests_failed": 0,
}  # fmt: skip


def model(name: str, **engine: Any) -> dict[str, Any]:
    return {"id": name, "status": "ready", "embedder": None, "reranker": None, "engine": {**ENGINE, **engine}}


def worker(name: str, *models: Any, age_s: float = 0.5, **told: Any) -> dict[str, Any]:
    known = {"pool": "default", "wanted": [], "failures": {}, "cores": {"uses": 1.5}}
    return {"name": name, "models": list(models), "age_s": age_s, **known, **told}


def seen(*live: Any, **told: Any) -> dict[str, Any]:
    totals = {"phase": "idle", **dict.fromkeys(COUNTED, 0)}
    known = {"waiting": {}, "queues": {}, "eta_s": {}, "unserved": [], "totals": totals, "dead": []}
    return {"workers": len(live), "live": list(live), **known, **told}


def shown(told: dict[str, Any], problem: str | None = None, height: int = 50) -> str:
    console = Console(width=100, record=True, height=height)
    console.print(screen(told, problem, height))
    return console.export_text()


def test_top_shows_what_no_worker_serves_first_then_the_longest_wait() -> None:
    names = ("quick", "slow", "lost", "empty")
    waiting = {"quick": 9, "slow": 2, "lost": 1, "empty": 0}
    eta = {"quick": 1.0, "slow": 99.0, "lost": None, "empty": 0.0}
    text = shown(seen(waiting=waiting, queues=waiting, eta_s=eta, unserved=["lost"]))
    firsts = [line.split()[0] for line in text.splitlines() if line.split()[:1] and line.split()[0] in names]
    assert firsts == ["lost", "slow", "quick"]
    assert "no worker serves it" in text
    assert "no worker lives" in text


def test_top_shows_the_busiest_model_and_the_silent_worker_first() -> None:
    idle = model("idle", slots_decoding=0, slots_prefilling=0, requests_waiting=0)
    text = shown(seen(worker("a", idle), worker("b", model("busy"), age_s=9.0)))
    assert text.index("busy") < text.index("idle")
    assert text.index("9.0 s ago") < text.index("0.5 s ago")
    for part in ("8/8", "96 %", "25 %"):
        assert part in text


@pytest.mark.parametrize("height", [24, 40])
def test_top_is_one_screen(height: int) -> None:
    live = [worker(f"w{number}", model(f"m{number}")) for number in range(200)]
    waiting = {f"m{number}": 5 for number in range(200)}
    text = shown(seen(*live, waiting=waiting, queues=waiting, eta_s=dict.fromkeys(waiting, 1.0)), height=height)
    assert len(text.rstrip().splitlines()) <= height
    assert "more" in text


def test_top_keeps_what_it_saw_while_redis_is_away() -> None:
    text = shown(seen(worker("w", model("[red]m"))), problem="Redis [x] does not answer")
    assert "Redis [x] does not answer; looking again" in text
    assert "[red]m" in text


def test_top_shows_why_a_model_is_lacking() -> None:
    failure = {"code": "model_load_failed", "message": "no such file\nand more", "retryable": False}
    text = shown(seen(worker("w", failures={"m": failure}, wanted=[{"model": "m", "state": "lacking"}])))
    assert "w: m: no such file" in text
    assert "and more" not in text
