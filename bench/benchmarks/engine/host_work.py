"""Measure the time that a decode step spends outside llama.cpp, with a large vocabulary and with one slot.

The vocabulary's part compares the engine with llama-server on a model that is little more than a vocabulary of 152k
tokens. The other part compares one slot with llama-batched-bench, which only decodes.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import llama_cpp.llama_cpp as lib

from cellama.bench.harness.engines import (
    CORES,
    GREEDY,
    cached_model,
    context,
    loaded,
    model_path,
    random_prompts,
    run_all,
    warm_up,
)
from cellama.bench.harness.report import Report
from cellama.bench.models.synthetic import Shape
from cellama.bench.peers.programs import BATCHED_BENCH, batched_bench, llama_server, program
from cellama.engine import Model, SamplingParams
from cellama.engine.models.sources import resolve

MODEL = "152k vocabulary, synthetic 174M and bundled://tiny"
VOCABULARY = Shape(n_embd=64, n_layer=2, n_head=2, n_head_kv=2, n_ff=128, n_vocab=152064)
PROMPT = 4  # tokens per prompt: the benchmark measures decode steps
_FILTERS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_PENALTIES = {"repeat_penalty": 1.1, "repeat_last_n": 64, "frequency_penalty": 0.1, "presence_penalty": 0.1}
SAMPLING: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0},
    "filters": _FILTERS,
    "filters and penalties": {**_FILTERS, **_PENALTIES},
}
PARTS = ("vocabulary", "one slot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--slots", type=int, default=64, help="number of slots with the large vocabulary")
    parser.add_argument("--new", type=int, default=48, help="number of tokens to generate per slot")
    parser.add_argument("--stream", type=int, default=256, help="number of tokens to generate with one slot")
    parser.add_argument("--rounds", type=int, default=7)


@dataclass(slots=True)
class DecodeCalls:
    """The number of llama.cpp's decode calls, and their total duration in seconds."""

    num: int = 0
    seconds: float = 0.0

    def timed(self, decode: Callable[..., int]) -> Callable[..., int]:
        """Return a function that calls `decode` and measures the call."""

        def call(*args: Any) -> int:
            started = time.perf_counter()
            try:
                return decode(*args)
            finally:
                self.seconds += time.perf_counter() - started
                self.num += 1

        return call


@contextlib.contextmanager
def decode_calls() -> Iterator[DecodeCalls]:
    """Measure all decode calls of this process within the `with` block."""
    calls = DecodeCalls()
    with mock.patch.object(lib, "llama_decode", calls.timed(lib.llama_decode)):
        yield calls


@dataclass(frozen=True, slots=True)
class Measured:
    """A run of the engine: tokens per second, and milliseconds per decode call inside and outside llama.cpp."""

    rate: float
    inside_ms: float
    outside_ms: float

    @staticmethod
    def of(model: Model, prompts: Sequence[Sequence[int]], num_new: int, sampling: SamplingParams) -> Measured:
        """Run all prompts concurrently."""
        with decode_calls() as calls:
            seconds, _ = run_all(model, prompts, num_new, sampling=sampling, cache_prompt=False)
        inside = calls.seconds / calls.num
        return Measured(len(prompts) * num_new / seconds, inside * 1e3, (seconds / calls.num - inside) * 1e3)


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    targets: dict[str, str] = {}
    if "vocabulary" in args.parts:
        for row in _vocabulary(args):
            rows.append(row)
            targets[_name(row)] = ">= 2.0"
    if "one slot" in args.parts:
        for name, path, target in _models(args.model):
            rows.append(_one_slot(name, path, args))
            targets[_name(rows[-1])] = target
    ratios = {_name(row): row["ratio"] for row in rows if row["ratio"] != "-"}
    return Report(
        rows,
        ratios,
        {name: target for name, target in targets.items() if name in ratios},
        [
            "Rounds alternate between the programs, and medians are shown. The milliseconds outside llama.cpp are the "
            "duration of a run per decode call, less the duration of llama_decode, and include the submission of the "
            "requests and their ends. llama-server replies without streaming, so its clients cost it nothing.",
        ],
    )


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {row['slots']} slots, {row['sampling']}: rate over {row['peer']}"


def _row(model: str, slots: int, sampling: str, peer: str, ours: Sequence[Measured], theirs: Sequence[float]) -> Any:
    ratio = median(mine.rate / other for mine, other in zip(ours, theirs, strict=True)) if theirs else "-"
    return {
        "model": model,
        "slots": slots,
        "sampling": sampling,
        "engine t/s": median(mine.rate for mine in ours),
        "ms in llama.cpp": median(mine.inside_ms for mine in ours),
        "ms outside": median(mine.outside_ms for mine in ours),
        "peer": peer,
        "peer's t/s": median(theirs) if theirs else "-",
        "ratio": ratio,
    }


def _vocabulary(args: argparse.Namespace) -> list[dict[str, Any]]:
    path, size = args.model or cached_model("vocabulary-152k-q8_0.gguf", VOCABULARY, "Q8_0"), PROMPT + args.new
    ours: dict[str, list[Measured]] = {name: [] for name in SAMPLING}
    theirs: dict[str, list[float]] = {name: [] for name in SAMPLING}
    with (
        loaded(path, n_parallel=args.slots, ctx_per_slot=size, speculation="off") as model,
        llama_server(path, args.slots, size, CORES) as server,
    ):
        for round_ in range(-1, args.rounds):  # the first round is a warm-up
            prompts = random_prompts(args.slots, PROMPT, seed=round_ + 1)
            for name, sampling in SAMPLING.items():
                mine = Measured.of(model, prompts, args.new, SamplingParams(seed=1, **sampling))  # type: ignore[arg-type]
                other = server.rate_of_all(prompts, args.new, seed=1, **sampling) if server else None
                if round_ >= 0:
                    ours[name].append(mine)
                    theirs[name] += [] if other is None else [other]
    model_name = args.model.name if args.model else "152k vocabulary"
    return [_row(model_name, args.slots, name, "llama-server", ours[name], theirs[name]) for name in SAMPLING]


def _models(given: Path | None) -> list[tuple[str, Path, str]]:
    """Return the models for one slot: their names, files and targets."""
    if given:
        return [(given.name, given, ">= 0.9")]
    return [("174M", model_path(None), ">= 0.98"), ("bundled", resolve("bundled://tiny"), ">= 0.9")]


def _one_slot(name: str, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    peer, size = program(BATCHED_BENCH), context(1, PROMPT, args.stream)
    ours: list[Measured] = []
    theirs: list[float] = []
    for round_ in range(args.rounds):
        with loaded(path, n_parallel=1, n_ctx=size, n_batch=2048, speculation="off") as model:
            warm_up(model)
            ours.append(Measured.of(model, random_prompts(1, PROMPT, seed=round_), args.stream, GREEDY))
        if peer:
            found = batched_bench(
                peer, path, 1, PROMPT, args.stream, "-c", str(size), "-b", "2048", "-ub", "512", "-t", str(CORES)
            )
            theirs.append(float(found["speed_tg"]))
    return dict(_row(name, 1, "greedy", "llama-batched-bench", ours, theirs))
