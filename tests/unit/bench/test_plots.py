"""Pictures of kept results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cellama.bench.harness.report import RESULTS

pytest.importorskip("matplotlib", reason="pictures need matplotlib, which cellama[bench] brings")

ONLINE: dict[str, Any] = {
    "rows": [
        {"who": who, "load": load, "rate/s": rate, "ttft p50 ms": 100.0 * rate, "ttft p95 ms": 300.0 * rate}
        for who in ("cellama", "llama-server")
        for load in ("alone", "beside bulk")
        for rate in (0.5, 1.0)
    ]
}
MIXED = [  # each part in a line of its own
    {
        "requests": 16,
        "rows": [
            {"part": "at once", "who": who, "new tok/s": 100.0}
            for who in ("engine alone", "llama-server -np 8", "full passes (computed)")
        ],
    },
    *(
        {"requests": 16, "rows": [{"part": load, **row} for row in ONLINE["rows"] if row["load"] == load]}
        for load in ("alone", "beside bulk")
    ),
]
OFFLINE = {
    "lines": 24,
    "ratios": {"families: over naive Celery task": 3.5, "families: prefilled over the optimum": 1.0},
    "targets": {"families: over naive Celery task": ">= 3", "families: prefilled over the optimum": "<= 1.05"},
}


SPECULATION = {
    "ratios": {"copying, 4 streams: on over off": 1.5, "copying, 4 streams: ours over llama-server's, none": 2.0},
    "targets": {"copying, 4 streams: on over off": ">= 1.4"},
}


def keep(folder: Path, name: str, *lines: dict[str, Any]) -> None:
    told = {"bench": name, "model": "m", "machine": "a machine", "commit": "abc", "ratios": {}, "targets": {}}
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(told | line) + "\n" for line in lines))


def test_pictures_are_drawn_from_the_kept_results(tmp_path: Path) -> None:
    from cellama.bench.plots import draw

    written = draw(RESULTS, tmp_path)
    assert {"slots.png", "comparisons.png"} <= {path.name for path in written}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_only_what_has_results_is_drawn(tmp_path: Path) -> None:
    from cellama.bench.plots import draw

    assert draw(tmp_path, tmp_path / "none") == []
    keep(tmp_path, "offline", OFFLINE)
    keep(tmp_path, "online", ONLINE)
    keep(tmp_path, "mixed", *MIXED)
    keep(tmp_path, "speculation", SPECULATION)
    names = ["offline.png", "online.png", "mixed.png", "speculation.png"]
    assert [path.name for path in draw(tmp_path, tmp_path)] == names
