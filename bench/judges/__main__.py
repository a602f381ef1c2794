"""Let other projects' load generators measure cellama's gateway and llama-server: `make judge`.

GuideLLM and AIPerf are installed in `build/judges`, each in an environment of its own, and run unmodified. For each
judge, workload and server, the judge measures a server that was just started. Then our own client sends the judge's
requests, with the same bodies at the same times, to another server that was just started.

The measurement consists of parts, one for each judge and workload. A finished part is kept in `build/judges`, so the
command continues where it was interrupted. When all parts are finished, the command prints the tables.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.engines import CORES, padded_model
from cellama.bench.harness.report import Report, show
from cellama.bench.harness.service import serving
from cellama.bench.peers.gateway_process import gateway
from cellama.bench.peers.http_client import complete_openai
from cellama.bench.peers.offline_tools import OfflineTool
from cellama.bench.peers.programs import llama_server
from cellama.engine.bundled import TINY_PATH

from . import aiperf, guidellm, ours
from .figures import AGREEMENT, RunFigures, SentRequest
from .workloads import CONTEXT_TOKENS, TRACES, Workload, prompts, saturating, synthetic

FOLDER = Path(__file__).parents[2] / "build" / "judges"
JUDGES: dict[str, ModuleType] = {module.NAME: module for module in (guidellm, aiperf)}
MODEL, CELLAMA, SERVER = "bench", "cellama", "llama-server"
OWN = "our client"
SYNTHETIC = "synthetic "  # followed by the number of callers
WARM_UP = "The judges come from far away"
CAPACITY_REQUESTS = 24  # that are sent to find the rate of arrivals
CAVEATS = [
    "Judges, gateway, Redis and servers share the cores.",
    "Our own client sends the bodies that the judge sent, at the same times or with the same number of callers, to a "
    "server that was just started.",
]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped
    args = _arguments()
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    path = TINY_PATH if args.short else padded_model()
    own = {key: value for key, value in vars(args).items() if key not in ("minutes", "save", "again", "judges")}
    loads = [*TRACES, *(f"{SYNTHETIC}{count}" for count in args.callers)]
    kept = {key: value for key, value in own.items() if key != "callers"}  # each part has its own number of callers
    state = FinishedParts(FOLDER / ("short" if args.short else "full"), kept, again=args.again)
    with tempfile.TemporaryDirectory() as name:
        tools = {
            judge: OfflineTool.installed(FOLDER / judge, JUDGES[judge].PACKAGES, Path(name), path)
            for judge in args.judges
        }
        for load in loads:
            for judge, tool in tools.items():
                if state.has(f"{load} {judge}"):
                    continue
                if deadline and time.monotonic() > deadline:
                    print("the time is over; run the same command again to measure the remaining parts")
                    return 0
                workload = _workload(load, path, args, state)
                state.keep(f"{load} {judge}", _part(judge, tool, workload, path, args))
    rows = [row for load in loads for judge in tools for row in state.get(f"{load} {judge}")]
    show("judges", {"model": path.name, **own}, _report(rows), save=args.save)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make judge", description=__doc__)
    add = parser.add_argument
    add("--judges", nargs="+", choices=list(JUDGES), default=list(JUDGES), help="judges to run")
    add("--short", action="store_true", help="a quick run with the bundled model, whose figures mean little")
    add("--callers", type=int, nargs="*", default=[8, 1, 4], help="numbers of concurrent callers of synthetic text")
    add("--seconds", type=float, default=20.0, help="approximate duration of each run in seconds")
    add("--slots", type=int, default=8, help="number of slots of both servers")
    add("--threads", type=int, default=max(1, CORES - 1), help="number of threads of both servers")
    add("--load", type=float, default=0.6, help="arrival rate of the traces, relative to the capacity of the server")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, help="start no part after this time in minutes; the same command continues later")
    add("--again", action="store_true", help="measure all parts again")
    add("--save", action="store_true", help="append the result to bench/results/judges.jsonl")
    args = parser.parse_args()
    if args.short:
        args.callers, args.seconds = args.callers[:1], min(args.seconds, 3.0)
    return args


class FinishedParts:
    """Finished parts in a directory, each with the options under which it was measured."""

    def __init__(self, folder: Path, options: Mapping[str, Any], *, again: bool) -> None:
        self._folder, self._options, self._again = folder, dict(options), again
        self._new: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether a part with the same options is finished."""
        path = self._path(name)
        if not path.exists() or (self._again and name not in self._new):
            return False
        return bool(json.loads(path.read_text())["options"] == self._options)

    def get(self, name: str) -> Any:
        return json.loads(self._path(name).read_text())["value"]

    def keep(self, name: str, value: Any) -> None:
        self._new.add(name)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path(name).write_text(json.dumps({"options": self._options, "value": value}))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-')}.json"


@contextlib.contextmanager
def _serving(who: str, path: Path, args: argparse.Namespace) -> Iterator[int | None]:
    """Run a warm server until the block ends, and yield its port, or None if llama-server is missing."""
    if who == SERVER:
        with llama_server(path, args.slots, CONTEXT_TOKENS, args.threads) as server:
            yield server.port if server else None
        return
    model = {"source": str(path), "n_parallel": args.slots, "threads": args.threads, "capabilities": ["generate"]}
    model |= {"ctx_per_slot": CONTEXT_TOKENS, "batch_strategy": "adaptive"}
    port = free_port()
    with serving(model), gateway(port):
        asyncio.run(complete_openai(port, MODEL, WARM_UP, 4, lambda: None))
        yield port


def _workload(load: str, path: Path, args: argparse.Namespace, state: FinishedParts) -> Workload:
    """Return the requests of a load, as many as fit into the duration of a run."""
    rate_of = f"rate of {load}"
    if not state.has(rate_of):
        state.keep(rate_of, _capacity(load, path, args))
    rate = state.get(rate_of)
    if load in TRACES:
        return TRACES[load](max(4, round(args.seconds * args.load * rate)), args.load * rate, args.seed)
    callers = int(load.removeprefix(SYNTHETIC))
    return synthetic(callers, max(callers, round(args.seconds * rate)))


def _capacity(load: str, path: Path, args: argparse.Namespace) -> float:
    """Return the requests per second of a load that cellama completes if all of its callers or slots are busy."""
    if load in TRACES:
        shape = TRACES[load](CAPACITY_REQUESTS, 1.0, args.seed)  # the first requests of the workload
    else:
        shape = saturating(synthetic(int(load.removeprefix(SYNTHETIC)), 0), CAPACITY_REQUESTS)
    common: dict[str, Any] = {"model": MODEL, "temperature": 0, "ignore_eos": True, "stream": True}
    common["stream_options"] = {"include_usage": True}
    sent = [
        SentRequest(0.0, {**common, "prompt": prompt, "max_tokens": row.output_length})
        for prompt, row in zip(prompts(shape), shape.rows, strict=True)
    ]
    with _serving(CELLAMA, path, args) as port:
        assert port is not None
        rate = asyncio.run(ours.measure(port, sent, shape.concurrency or args.slots, aiperf.DEFINITIONS)).request_rate
    print(f"{load}: {rate:.2f} requests per second", flush=True)
    return rate


def _part(
    judge: str, tool: OfflineTool, workload: Workload, path: Path, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure a workload on both servers with a judge, and with our own client. Return the rows of the table."""
    rows = []
    for who in (CELLAMA, SERVER):
        with _serving(who, path, args) as port:
            if port is None:
                continue
            judgement = JUDGES[judge].measure(tool, workload, f"http://127.0.0.1:{port}", MODEL)
        with _serving(who, path, args) as port:
            assert port is not None
            definitions = JUDGES[judge].DEFINITIONS
            own = asyncio.run(ours.measure(port, judgement.sent, workload.concurrency, definitions))
        for client, figures in ((judge, judgement.figures), (OWN, own)):
            rows.append({"workload": workload.name, "judge": judge, "server": who, "client": client, **asdict(figures)})
            print(rows[-1], flush=True)
    return rows


def _report(rows: list[dict[str, Any]]) -> Report:
    """Return the rows, what the judges say about both servers, and how our client's figures differ from theirs."""
    ratios: dict[str, float] = {}
    targets: dict[str, str] = {}
    figures: dict[tuple[str, str], dict[tuple[str, str], RunFigures]] = {}
    for row in rows:
        found = figures.setdefault((row["workload"], row["judge"]), {})
        found[row["server"], row["client"]] = RunFigures(**{name: row[name] for name in RunFigures.__slots__})
    for (workload, judge), found in figures.items():
        for (who, client), judged in found.items():
            if client == OWN:
                continue
            if who == CELLAMA and (theirs := found.get((SERVER, judge))):
                name = f"{workload}, {judge}: cellama's over llama-server's"
                ratios[f"{name} tokens per second"] = judged.token_rate / theirs.token_rate
                ratios[f"{name} first token, mean"] = judged.first_mean_ms / theirs.first_mean_ms
                ratios[f"{name} gap, mean"] = judged.gap_mean_ms / theirs.gap_mean_ms
            name = f"{workload}, {judge}, {who}: our client's figure over the judge's"
            for figure, share in found[who, OWN].difference_to(judged).items():
                ratios[f"{name}, {figure}"] = 1 + share
                targets[f"{name}, {figure}"] = f"{1 - AGREEMENT:g} to {1 + AGREEMENT:g}"
    return Report(rows, ratios, targets, CAVEATS)


if __name__ == "__main__":
    raise SystemExit(main())
