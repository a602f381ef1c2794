"""Inject faults into workers, Redis and journals, and check the outcome of each job.

Workers are killed, suspended or started with skewed clocks. Redis restarts, loses recent writes or refuses commands.
Journals expire. Real worker processes with the bundled model and a real Redis run on this machine. Half of the jobs
stream their output. All jobs are greedy, and each text is compared with the text of an undisturbed run. Texts that
diverge at a near tie are counted separately (reference_texts.py). In the first six scenarios, clients read some of the
streams while their jobs are running. A token counts as generated twice if two workers sampled it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cellama.bench.harness.fatal_points import POINTS
from cellama.bench.harness.reference_texts import ReferenceText
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import FragileStrategy, Service

from . import expired, tenants
from .canvases import ENDS, CanvasScenario
from .expired import WAYS, ExpiryScenario
from .refusals import REFUSALS, RefusalScenario
from .scenario import SLOTS, SOURCE, Scenario, shown
from .tenants import TenantScenario
from .troubles import APART_S, LEASE_S

MODEL = "bundled tiny"
WITH_CANVASES = ("canvas", "ends")
# Scenarios run in this order. `refusals` made no progress after `canvas` in one process; the cause is unknown.
SCENARIOS = (
    "kills",
    "outages",
    "freezes",
    "clocks",
    "rollbacks",
    "poison",
    "refusals",
    "expired",
    "tenants",
    *WITH_CANVASES,
)

Found = tuple[list[dict[str, Any]], list[str]]  # rows and violations


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--new", type=int, default=600, help="number of tokens per job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--outages", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=20)
    parser.add_argument("--rollbacks", type=int, default=5)
    parser.add_argument("--period", type=float, default=4.0, help="seconds between injected faults")
    parser.add_argument(
        "--canvases", type=int, default=6, help="number of canvases of each kind in the `canvas` scenario"
    )
    parser.add_argument("--chord", type=int, default=50, help="number of parts per chord")
    parser.add_argument(
        "--ends",
        type=int,
        default=2 * len(ENDS),
        help="number of workers to kill between a job's end and the next step",
    )
    parser.add_argument(
        "--points",
        nargs="+",
        choices=list(POINTS),
        default=list(POINTS),
        help="points between a job's end and the next step at which to kill workers",
    )
    parser.add_argument("--refusals", nargs="+", choices=REFUSALS, default=list(REFUSALS))
    parser.add_argument(
        "--refused", type=float, default=5.0, help="duration in seconds of each period in which Redis refuses commands"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways to stop workers in the `expired` scenario"
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    undisturbed: list[ReferenceText] = []
    for name in sorted(args.scenarios, key=SCENARIOS.index):
        with tempfile.TemporaryDirectory() as folder, _service(name, Path(folder), args.workers) as service:
            service.dies_at_points = name == "ends"
            for number in range(args.workers):
                service.start_worker(ahead_s=(0.5 - number % 2) * APART_S if name == "clocks" else 0.0)
            service.wait_ready()
            if name not in WITH_CANVASES:
                undisturbed = undisturbed or Scenario(service, args).undisturbed()
            found, problems = _run_one(name, service, args, undisturbed)
            rows += found
            wrong += problems
    caveats = ["The workers share the cores with Redis and the producer, so times are not meaningful."]
    return Report(rows, caveats=caveats, wrong=wrong)


def _service(scenario: str, folder: Path, num_workers: int) -> Service:
    model = {"id": "tiny", "source": SOURCE, "n_parallel": SLOTS, "threads": 1, "default": True}
    if scenario == "poison":
        model["batch_strategy"] = f"{FragileStrategy.__module__}:{FragileStrategy.__name__}"
    settings = expired.SETTINGS if scenario == "expired" else {}
    if scenario in ("outages", "refusals"):
        settings = {"lease_s": str(LEASE_S)}
    if scenario == "tenants":
        settings = tenants.settings(num_workers)
    return Service(folder, [model], **settings)


def _run_one(name: str, service: Service, args: argparse.Namespace, undisturbed: list[ReferenceText]) -> Found:
    others: dict[str, Callable[[], Found]] = {
        "canvas": lambda: CanvasScenario(service, args).canvas(),
        "ends": lambda: CanvasScenario(service, args).ends(),
        "refusals": lambda: RefusalScenario(service, args).refusals(undisturbed),
        "tenants": lambda: TenantScenario(service, args).tenants(undisturbed),
        "expired": lambda: ExpiryScenario(service, args).expired(undisturbed),
    }
    return others[name]() if name in others else ([shown(Scenario(service, args).run(name, undisturbed))], [])
