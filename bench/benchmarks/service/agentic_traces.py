"""Measure how much of each turn is recomputed in coding-agent sessions that AIPerf generates and sends.

Each session consists of a head that all sessions share, the context of a repository, files that only this session
contains, and turns that add tool results. AIPerf sends the model's replies back as part of the session's history. A
proxy between AIPerf and the gateway records the usage of each turn. AIPerf is installed from PyPI into a separate
environment.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving
from cellama.bench.models.templated import write_templated
from cellama.bench.peers.aiperf import AIPerf
from cellama.bench.peers.gateway_process import gateway
from cellama.bench.peers.recorder import Exchange, recording
from cellama.engine.bundled import TINY_PATH

MODEL = "bench"
ENDPOINTS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
SESSION = "x-correlation-id"  # header with the id of AIPerf's session, whose turns follow one another
CONTEXT_TOKENS = 16_384  # per slot: 40 turns need about 9,000 tokens
REUSED = "lowest share of a previous turn that is reused, in %"
TARGET = ">= 97"
CAVEATS = [
    "AIPerf's texts are random words, and the bundled model's replies to them end early.",
    "AIPerf joins the reasoning and the text of a reply, so the gateway computes replies with reasoning again.",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--environment", help="virtual environment directory for AIPerf (default: a new temporary directory)"
    )
    parser.add_argument("--sessions", type=int, default=4, help="number of sessions")
    parser.add_argument("--seed", type=int, default=36, help="seed for generating the sessions")
    parser.add_argument("--turns", type=int, default=40, help="number of turns per session")
    parser.add_argument(
        "--concurrency", type=int, default=2, help="number of concurrent sessions, each with its own slot"
    )
    parser.add_argument("--endpoints", nargs="+", choices=list(ENDPOINTS), default=list(ENDPOINTS))
    parser.add_argument(
        "--templates", nargs="+", default=[], help="chat template files to measure (default: the model's own template)"
    )


@dataclass(frozen=True)
class TraceRun:
    """The token counts of one run.

    `lowest` and `median` are percentages of the previous turn's prompt and reply that were found in the cache.
    """

    template: str
    endpoint: str
    sessions: int
    turns: int
    prompt_tokens: int
    cached_tokens: int
    lowest: float
    median: float


def run(args: argparse.Namespace) -> Report:
    rows, wrong = list[TraceRun](), list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = Path(args.environment).absolute() if args.environment else folder / "environment"
        aiperf = AIPerf.installed(environment, folder, TINY_PATH)
        trace = aiperf.synthesize(args.sessions, _distributions(args.turns), args.seed)
        for template in args.templates or [""]:
            path = folder / "model.gguf" if template else TINY_PATH
            if template:
                write_templated(path, Path(template).read_text(encoding="utf-8"))
            options = {"n_parallel": args.concurrency, "ctx_per_slot": CONTEXT_TOKENS, "batch_strategy": "adaptive"}
            port = free_port()
            with serving({"source": str(path), **options}), gateway(port):
                for endpoint in args.endpoints:
                    with recording(port, lambda _: None) as recorder:
                        aiperf.replay(trace, recorder.url, MODEL, endpoint, args.concurrency)
                    called = Path(template).stem or "bundled"
                    rows.append(_row(called, endpoint, recorder.exchanges))
                    wrong += _problems(rows[-1], recorder.exchanges, args.sessions, args.turns)
    lowest = {f"{row.template}, {row.endpoint}: {REUSED}": row.lowest for row in rows}
    return Report([asdict(row) for row in rows], lowest, dict.fromkeys(lowest, TARGET), CAVEATS, wrong)


def _sessions(endpoint: str, exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """Return the turns of each session, in order."""
    sessions: dict[str, list[Exchange]] = {}
    for exchange in exchanges:
        if exchange.path == ENDPOINTS[endpoint] and exchange.status == 200:
            sessions.setdefault(exchange.headers[SESSION], []).append(exchange)
    return list(sessions.values())


def _row(template: str, endpoint: str, exchanges: Sequence[Exchange]) -> TraceRun:
    sessions = _sessions(endpoint, exchanges)
    usages = [[turn.usage for turn in turns] for turns in sessions]
    shares = [
        100 * cached / (before[0] + before[2])
        for session in usages
        for before, (_, cached, _) in itertools.pairwise(session)
    ]
    return TraceRun(
        template=template,
        endpoint=endpoint,
        sessions=len(sessions),
        turns=sum(map(len, sessions)),
        prompt_tokens=sum(prompt for session in usages for prompt, _, _ in session),
        cached_tokens=sum(cached for session in usages for _, cached, _ in session),
        lowest=min(shares),
        median=median(shares),
    )


def _problems(row: TraceRun, exchanges: Sequence[Exchange], sessions: int, turns: int) -> list[str]:
    """Return descriptions of a run's failed requests and of missing turns."""
    called = f"{row.template}, {row.endpoint}"
    failed = [f"{called}: {one.status}: {one.answer[:300]}" for one in exchanges if one.status >= 400]
    if (row.sessions, row.turns) != (sessions, sessions * turns):
        failed.append(f"{called}: {row.turns} turns of {row.sessions} sessions instead of {sessions} x {turns}")
    return failed


def _distributions(turns: int) -> dict[str, Any]:
    """Return the lengths of AIPerf's sessions in tokens, scaled down to the context of a small model."""
    return {
        "turns": dict.fromkeys(("mean", "median", "min", "max"), turns),
        "max_prompt_tokens": CONTEXT_TOKENS,
        "new_tokens_per_turn": {"mean": 120, "median": 100, "min": 20, "max": 300},
        "generation_length": {"mean": 32, "median": 30, "min": 5, "max": 64},
        "cache": {
            "layer1_tokens": 400,
            "layer1_5_tokens": 200,
            "layer2": {"mean": 200, "median": 150, "min": 50, "max": 400},
            "layer1_5_groups": {"num_groups": 2},
        },
        "inter_turn_delay": {"agentic_fraction": 1.0, "agentic_delay": {"mean": 10, "median": 8}, "max": 20},
    }
