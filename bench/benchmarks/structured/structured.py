"""Measure the cost of schemas while 64 slots generate JSON, and the separate costs of masks and compilation.

Runs with and without schemas alternate, and generate the same number of tokens in the same batches. No text may end
before max_tokens, so each schema describes a long list. Without `--model`, this benchmark uses the padded model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from cellama.bench.harness.engines import (
    CORES,
    Together,
    loaded,
    loaded_each,
    padded_model,
    percentile,
    run_together,
    warm_up,
)
from cellama.bench.harness.report import Report
from cellama.bench.models.vocabulary import greedy_spelling, vocabulary
from cellama.engine import Model, Request, SamplingParams
from cellama.engine.grammar.grammars import Constraint, Grammars, GrammarSpec
from cellama.engine.llama.model import LlamaModel

from .typical_schemas import PLAIN, Schema, large, list_of, realistic, varied

MODEL = "padded 160M Q8_0"
CONTEXT = 512  # tokens per slot, for a prompt and its continuation
LISTED = 200  # items per list, more than max_tokens
FREE, BOUND, DRAFTED = "free", "constrained", "constrained, forced tokens as drafts"
SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "default": {}}
END = b"<end>"
CAVEATS = (
    "t/s: tokens per second from the moment when every slot has its first token (median of alternating rounds). Ratios "
    "are medians of the rounds' ratios. Schemas are compiled in a warm-up round that is not counted.",
    "mask: a mask of the whole vocabulary after each token of randomly drawn texts. The engine needs a mask only if "
    "the token that it sampled is not allowed. compile: the first use of a schema. Both are CPU times of the thread.",
)


class StructuredRun(NamedTuple):
    """One variant of the load, which sets the kind of speculation and whether schemas are used."""

    speculation: str
    is_bound: bool


RUNS = {FREE: StructuredRun("off", False), BOUND: StructuredRun("off", True), DRAFTED: StructuredRun("auto", True)}
COMPARED = {
    "constrained over free": (BOUND, FREE),
    "constrained with forced tokens as drafts over free": (DRAFTED, FREE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--new", type=int, default=64, help="number of tokens per request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sampling", nargs="+", default=list(SAMPLINGS), choices=list(SAMPLINGS))
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--vocabulary", type=int, default=150_000, help="number of tokens in the synthetic vocabulary")
    parser.add_argument("--masks", type=int, default=20_000, help="number of masks to compute per vocabulary")
    parser.add_argument("--schemas", type=int, default=200, help="number of additional generated schemas to compile")
    parser.add_argument("--parts", nargs="+", default=["load", "masks"], choices=["load", "masks"])


def run(args: argparse.Namespace) -> Report:
    path = args.model or padded_model()
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    if "load" in args.parts:
        _run_load(path, args, rows, ratios)
    if "masks" in args.parts:
        for name, grammars in _vocabularies(path, args.vocabulary):
            _time_masks(name, grammars, args, rows, ratios)
    targets = {key: ">= 0.97" for key in ratios if key.endswith(": constrained over free")}
    targets |= {key: "<= 2" for key in ratios if key.endswith("mask ms, p99.9")}
    targets |= {key: "<= 5" for key in ratios if key.endswith("compile ms, p50")}
    return Report(rows, ratios, targets, CAVEATS)


# The load


def _run_load(path: Path, args: argparse.Namespace, rows: list[dict[str, Any]], ratios: dict[str, float]) -> None:
    options = {"n_parallel": args.slots, "ctx_per_slot": CONTEXT, "cache_ram_bytes": 0, "threads": args.threads}
    modes = {run.speculation: {**options, "speculation": run.speculation} for run in RUNS.values()}
    with loaded_each(path, **modes) as models:
        for model in models.values():
            warm_up(model)
        for sampling in args.sampling:
            came = _in_turns(models, sampling, args)
            rows += [_row(sampling, name, rounds) for name, rounds in came.items()]
            for key, (one, other) in COMPARED.items():
                pairs = zip(came[one], came[other], strict=True)
                ratios[f"{sampling}: {key}"] = median(a.rate / b.rate for a, b in pairs)


def _in_turns(models: Mapping[str, Model], sampling: str, args: argparse.Namespace) -> dict[str, list[Together]]:
    """Return the results of each run, keyed by name.

    The first round is a warm-up, and the order alternates between rounds.
    """
    came: dict[str, list[Together]] = {name: [] for name in RUNS}
    for number in range(args.rounds + 1):
        for name in list(RUNS)[:: -1 if number % 2 else 1]:
            one = RUNS[name]
            scope = f"{sampling} {number} {name}"
            requests = _requests(models[one.speculation], one, SAMPLINGS[sampling], scope, args)
            found = run_together(models[one.speculation], requests)
            short = [done for done in found.completions if len(done.tokens) != args.new]
            if short:
                raise SystemExit(f"structured: {name}: {len(short)} of {args.slots} texts ended too early")
            print(f"{sampling}, round {number}, {name}: {found.rate:.1f} t/s", file=sys.stderr, flush=True)
            if number:
                came[name].append(found)
    return came


def _requests(
    model: Model, run: StructuredRun, sampling: Mapping[str, Any], scope: str, args: argparse.Namespace
) -> list[Request]:
    names = list(PLAIN)
    schemas = {name: json.dumps(list_of(PLAIN[name], minItems=LISTED, maxItems=2 * LISTED)) for name in names}
    requests = []
    for number in range(args.slots):
        name = names[number % len(names)]
        keys = ", ".join(PLAIN[name]["properties"])
        prompt = f"<|im_start|>user\nMake a JSON list of {name}s: {keys}. {number}<|im_end|>\n<|im_start|>assistant\n"
        schema: dict[str, Any] = {"json_schema": schemas[name]} if run.is_bound else {}
        requests.append(
            Request(
                str(number),
                tuple(model.tokenize(prompt, parse_special=True)),
                sampling=SamplingParams(**sampling, **schema, seed=number),
                max_tokens=args.new,
                ignore_eos=True,
                cache_scope=scope,
            )
        )
    return requests


def _row(sampling: str, name: str, rounds: Sequence[Together]) -> dict[str, Any]:
    rates = [one.rate for one in rounds]
    drafted = sum(one.num_accepted + one.num_rejected for one in rounds)
    num_tokens = [sum(len(done.tokens) for done in one.completions) for one in rounds]
    return {
        "sampling": sampling,
        "run": name,
        "t/s": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "tokens": num_tokens[0],
        "drafted/token": drafted / sum(num_tokens),
        "accepted": sum(one.num_accepted for one in rounds) / max(1, drafted),
    }


# Masks and compilation


def _vocabularies(path: Path, size: int) -> Iterator[tuple[str, Grammars]]:
    tokens = vocabulary(size - 1)
    yield f"{size:,} tokens", Grammars([*tokens, END], {}, frozenset([size - 1]), greedy_spelling(tokens))
    with loaded(path, n_parallel=1, ctx_per_slot=512) as model:
        assert isinstance(model.engine.vocabulary, LlamaModel)
        yield "the model's", model.engine.vocabulary.grammars


def _time_masks(
    name: str,
    grammars: Grammars,
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    ratios: dict[str, float],
) -> None:
    _compile(grammars, {"type": "null"})  # makes the tables of the vocabulary
    walked, compiled, accepted, begun = _Times(), _Times(), _Times(), _Times()
    schemas = [*realistic().values(), *varied(args.schemas)]
    constraints: list[Callable[[], Constraint]] = []
    for schema in schemas:
        with compiled.measured():
            begin = _compile(grammars, schema)
        constraints.append(begin)
    for number in range(sys.maxsize):
        if len(walked.seconds) >= args.masks:
            break
        with begun.measured():
            constraint = constraints[number % len(constraints)]()
        _walk(constraint, Random(number), walked, accepted)
    heavy = _Times()
    for schema in large().values():
        with heavy.measured():
            _compile(grammars, schema)
    times = {"mask": walked, "accept": accepted, "begin": begun, "compile": compiled, "compile, large": heavy}
    for what, of in times.items():
        rows.append({"vocabulary": name, "ms of": what, **of.percentiles()})
    ratios[f"{name}: mask ms, p99.9"] = walked.percentiles()["p99.9"]
    ratios[f"{name}: compile ms, p50"] = compiled.percentiles()["p50"]


def _compile(grammars: Grammars, schema: Schema) -> Callable[[], Constraint]:
    return grammars.compile(GrammarSpec("json_schema", json.dumps(schema))).start


def _walk(constraint: Constraint, random: Random, masks: _Times, accepts: _Times) -> None:
    """Time the masks and the accepted tokens of a random text.

    Half of the tokens are short, so that the text gets beyond its first word.
    """
    for _ in range(100):
        with masks.measured():
            mask = constraint.mask()
        assert mask is not None
        ids = np.flatnonzero(mask[:-1])  # the last one ends the text
        if not len(ids):
            return
        few = ids[ids < 500]
        token = int(random.choice(few if len(few) and random.random() < 0.5 else ids))
        with accepts.measured():
            constraint.accept(token)


class _Times:
    """Collects the CPU time that the current thread uses for each operation, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.seconds.append(time.thread_time() - started)

    def percentiles(self) -> dict[str, float]:
        """Return the number of measured durations, and their percentiles and maximum in milliseconds."""
        shares = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}
        found = {name: percentile(self.seconds, share) * 1e3 for name, share in shares.items()}
        return {"count": len(self.seconds), **found, "longest": max(self.seconds) * 1e3}
