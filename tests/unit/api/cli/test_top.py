"""Test `cellama top`, which shows the longest waits first, on one screen."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from cellama.api.cli.status import render_screen
from cellama.api.client.registry_views import COUNTED
from cellama.tasks.state.tenants import TenantShare

ENGINE = {
    "slots_prefilling": 1, "slots_decoding": 7, "slots_total": 8, "requests_waiting": 3, "generation_rate": 80.0,
    "kv_used_tokens": 96, "kv_total_tokens": 100, "cache_hits": 1, "cache_misses": 3, "preemptions": 2,
    "requests_failed": 0,
}  # fmt: skip


def model(name: str, **engine: Any) -> dict[str, Any]:
    return {"id": name, "status": "ready", "embedder": None, "reranker": None, "engine": {**ENGINE, **engine}}


def worker(name: str, *models: Any, age_s: float = 0.5, **fields: Any) -> dict[str, Any]:
    known = {"pool": "default", "wanted": [], "failures": {}, "cores": {"uses": 1.5}}
    return {"name": name, "models": list(models), "age_s": age_s, **known, **fields}


def view(*live: Any, **fields: Any) -> dict[str, Any]:
    totals = {"phase": "idle", **dict.fromkeys(COUNTED, 0)}
    known = {"waiting": {}, "queues": {}, "classes": {}, "unserved": [], "totals": totals, "dead": [], "tenants": []}
    return {"workers": len(live), "live": list(live), **known, **fields}


def shown(view: dict[str, Any], problem: str | None = None, height: int = 50, width: int = 100) -> str:
    console = Console(width=width, record=True, height=height)
    console.print(render_screen(view, problem, height))
    return console.export_text()


def queue(interactive: int = 0, bulk: int = 0, eta_s: float | None = 1.0, oldest_s: float = 0.5) -> dict[str, Any]:
    """Return the classes of a queue. An interactive job waits for a tenth of the time of a bulk job."""
    bulk_class = {"oldest_s": oldest_s, "eta_s": eta_s}
    urgent = {**bulk_class, "eta_s": None if eta_s is None else eta_s / 10}
    return {"interactive": {**urgent, "waiting": interactive}, "bulk": {**bulk_class, "waiting": bulk}}


def queue_fields(queues: dict[str, Any], in_redis: int = 0, **more: Any) -> dict[str, Any]:
    waiting = {name: sum(found["waiting"] for found in classes.values()) for name, classes in queues.items()}
    return {"classes": queues, "waiting": waiting, "queues": dict.fromkeys(queues, in_redis), **more}


def test_top_shows_unserved_queues_first_and_sorts_queues_by_longest_wait() -> None:
    queues = {"quick": queue(interactive=9), "slow": queue(2, 1, eta_s=99.0), "lost": queue(1, eta_s=None)}
    text = shown(view(**queue_fields({**queues, "empty": queue()}, unserved=["lost"])))
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in (*queues, "empty")]
    assert rows == [  # jobs of each class, the oldest one's wait, a new job's wait in each class
        ["lost", "1", "0", "0.5", "s", "no", "worker", "no", "worker"],
        ["slow", "2", "1", "0.5", "s", "9.9", "s", "99.0", "s"],
        ["quick", "9", "0", "0.5", "s", "0.1", "s", "1.0", "s"],
    ]
    assert "no worker is running" in text


def test_top_shows_totals_on_one_line_of_a_narrow_terminal() -> None:
    busy = view(*(worker(f"w{number}") for number in range(12)))
    busy["totals"] |= {"slots_busy": 200, "slots_total": 256, "prompt_rate": 12345.6, "generation_rate": 1234.5}
    busy["totals"]["cache_hits"] = 1
    line = shown(busy).splitlines()[0]
    assert line == "12 workers, slots: 200/256, tok/s: 12346 prompt, 1234 generated, hits: 100 %"
    assert len(line) < 80


def test_top_shows_separate_waits_of_urgent_and_bulk_jobs_in_80_columns() -> None:
    text = shown(
        view(**queue_fields({"m": {**queue(0, 90_000, eta_s=28.7), "interactive": queue(eta_s=0.0)["interactive"]}})),
        width=80,
    )
    head, row = [line.split() for line in text.splitlines() if line.split()[:1] in (["queue"], ["m"])]
    assert head == ["queue", "interactive", "bulk", "oldest", "new", "interactive", "new", "bulk"]
    assert row == ["m", "0", "90000", "0.5", "s", "0.0", "s", "28.7", "s"]


def test_top_counts_plain_celery_messages_of_unserved_queues() -> None:
    queues = queue_fields({"lost": queue(eta_s=None)}, in_redis=7, unserved=["lost"])
    assert "lost (+7 from plain Celery) 0 0 ? no worker no worker" in " ".join(shown(view(**queues)).split())
    assert "plain Celery" not in shown(view(**{**queues, "unserved": []}))  # a worker is about to read them


def test_top_omits_the_queue_table_when_no_job_waits() -> None:
    text = shown(view(worker("w", model("m")), **queue_fields({"m": queue()})))
    assert "no job is waiting" in text
    assert "oldest" not in text


def test_top_shows_the_last_dead_jobs() -> None:
    job = {"id": "j1", "queue": "cellama:queue:m", "attempts": 3, "last_worker": "w@host"}
    text = shown(view(dead=[job]))
    assert "1 dead job" in text
    assert "dead: j1 in cellama:queue:m, 3 attempts, the last on w@host" in text


def test_top_sorts_models_by_load_and_workers_by_age() -> None:
    idle = model("idle", slots_decoding=0, slots_prefilling=0, requests_waiting=0)
    text = shown(view(worker("a", idle), worker("b", model("busy"), age_s=9.0)))
    assert text.index("busy") < text.index("idle")
    assert text.index("9.0 s ago") < text.index("0.5 s ago")
    for part in ("8/8", "96 %", "25 %"):
        assert part in text


def test_top_shows_tenants_if_there_are_several() -> None:
    shares = [TenantShare("acme", 3.0, 12, 4, 900.0), TenantShare("[red]", 1.0, 0, 1, 100.0)]
    rows = [line.split() for line in shown(view(tenants=shares)).splitlines()]
    assert ["acme", "3", "12", "4", "900", "90", "%"] in rows
    assert ["[red]", "1", "0", "1", "100", "10", "%"] in rows
    assert "acme" not in shown(view(tenants=shares[:1]))


@pytest.mark.parametrize("tenants", [[], [TenantShare(f"t{number}", 1.0, 1, 1, 1.0) for number in range(200)]])
@pytest.mark.parametrize("height", [28, 40])
def test_top_fits_onto_one_screen(height: int, tenants: list[TenantShare]) -> None:
    live = [worker(f"w{number}", model(f"m{number}")) for number in range(200)]
    job = {"id": "j", "queue": "q", "attempts": 3, "last_worker": "w"}
    queues = queue_fields({f"m{number}": queue(5, 5) for number in range(200)}, dead=[job] * 200, tenants=tenants)
    text = shown(view(*live, **queues), height=height)
    assert len(text.rstrip().splitlines()) <= height
    assert "more" in text


def test_top_keeps_the_last_view_when_redis_does_not_answer() -> None:
    text = shown(view(worker("w", model("[red]m"))), problem="Redis [x] does not answer")
    assert "Redis [x] does not answer; retrying" in text
    assert "[red]m" in text


def test_top_shows_why_a_model_failed_to_load() -> None:
    failure = {"code": "model_load_failed", "message": "no such file\nand more", "retryable": False}
    text = shown(view(worker("w", failures={"m": failure}, wanted=[{"model": "m", "state": "lacking"}])))
    assert "w: m: no such file" in text
    assert "and more" not in text
