"""Guessed tokens on against off, by kind of work and number of streams; llama-server with and without its n-grams."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cellama.bench.harness.engines import (
    GREEDY,
    loaded,
    loaded_each,
    model_path,
    padded_model,
    random_prompts,
    run_all,
    warm_up,
)
from cellama.bench.harness.report import Report
from cellama.bench.peers.programs import LLAMA_SERVER, LlamaServer, program
from cellama.bench.tiny_model.corpus import PLOTS, story_parts
from cellama.engine import Completion, Model, SamplingParams

CONTEXT = 1024
PEOPLE = [("Mia", 7, "Rome"), ("Leo", 31, "Oslo"), ("Rosa", 54, "Paris"), ("Finn", 12, "Berlin")]
SCHEMA = {
    "type": "array",
    "minItems": 8,
    "maxItems": 8,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}, "city": {"enum": []}},
        "required": ["name", "age", "city"],
        "additionalProperties": False,
    },
}


class Work(NamedTuple):
    """Prompts, and how they are gone on with."""

    prompts: list[list[int]]
    num_new: int
    params: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new", type=int, default=160, help="tokens")


def stories() -> list[tuple[str, str, str]]:
    """Openings with animal and name, the stories that follow from these, and the same with another name."""
    found = []
    for animal, plot in PLOTS.items():
        for name, other in zip(plot.names, (*plot.names[1:], plot.names[0]), strict=True):
            once, little, named, rest = story_parts(animal, name)
            _, _, named_other, rest_other = story_parts(animal, other)
            found.append((once + little + named, rest, once + little + named_other + rest_other))
    return found


def quoting(model: Model, streams: int, num_new: int) -> Work:
    """A story, and its opening: it is told again."""
    texts = [f"{opening}{rest}\n{opening}" for opening, rest, _ in stories()]
    return Work([model.tokenize(texts[i % len(texts)]) for i in range(streams)], num_new, {})


def edits(model: Model, streams: int, num_new: int) -> Work:
    """A story, and its opening with another name."""
    texts = [f"{other}\n{opening}" for opening, _, other in stories()]
    return Work([model.tokenize(texts[i % len(texts)]) for i in range(streams)], num_new, {})


def forced(model: Model, streams: int, num_new: int) -> Work:
    """JSON by a schema with fixed keys."""
    SCHEMA["items"]["properties"]["city"]["enum"] = [city for _, _, city in PEOPLE]  # type: ignore[index]
    asked = [
        f"<|im_start|>user\nMake JSON: name {name}, age {age}, city {city}<|im_end|>\n<|im_start|>assistant\n"
        for name, age, city in PEOPLE
    ]
    prompts = [model.tokenize(asked[i % len(asked)], parse_special=True) for i in range(streams)]
    sampling = SamplingParams(temperature=0, json_schema=json.dumps(SCHEMA))
    return Work(prompts, 400, {"sampling": sampling, "ignore_eos": False})


def unpredictable(model: Model, streams: int, num_new: int) -> Work:
    """Draws from random weights."""
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    return Work(random_prompts(streams, 64, seed=streams), num_new, {"sampling": sampling})


WORKS: dict[str, Callable[[Model, int, int], Work]] = {
    "quoting": quoting,
    "edits": edits,
    "forced": forced,
    "unpredictable": unpredictable,
}


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for name in args.work:
        path = model_path(args.model) if name == "unpredictable" else args.model or padded_model()
        for streams in args.streams:
            row = _compare(path, name, streams, args)
            if name in ("quoting", "edits"):
                row |= _peer(path, name, streams, args)
            rows.append(row)
            ratios[f"{name}, {streams} streams: on over off"] = row["on/off"]
    caveats = [
        "Tokens per second after the last first token; both engines in turns, in one process; medians of rounds.",
        "quoting, edits, forced: the bundled model padded to the cost of a large one; unpredictable: random weights.",
        "llama-server: --spec-type ngram-simple against none; its rates count the whole request.",
    ]
    return Report(rows, ratios, caveats=caveats)


def _compare(path: Path, name: str, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    options = {"n_parallel": streams, "ctx_per_slot": CONTEXT, "cache_ram_bytes": 0}
    rates: dict[str, list[float]] = {"off": [], "auto": []}
    same = accepted = rejected = 0
    with loaded_each(path, **{mode: {**options, "speculation": mode} for mode in rates}) as models:
        for model in models.values():
            warm_up(model)
        work = WORKS[name](models["off"], streams, args.new)
        for number in range(args.rounds):
            done: dict[str, list[Completion]] = {}
            for mode in sorted(rates, reverse=number % 2 == 0):
                params = {"sampling": GREEDY, **work.params, "cache_scope": f"{mode} {number}"}
                seconds, done[mode] = run_all(models[mode], work.prompts, work.num_new, **params)
                rates[mode].append(_rate(seconds, done[mode]))
            same += sum(a.tokens == b.tokens for a, b in zip(*done.values(), strict=True))
            accepted += sum(completion.usage.accepted_prediction_tokens for completion in done["auto"])
            rejected += sum(completion.usage.rejected_prediction_tokens for completion in done["auto"])
    off, on = median(rates["off"]), median(rates["auto"])
    return {
        "work": name,
        "streams": streams,
        "off t/s": off,
        "on t/s": on,
        "on/off": median([a / b for a, b in zip(rates["auto"], rates["off"], strict=True)]),
        "drafted/token": (accepted + rejected) / max(1, args.rounds * sum(len(c.tokens) for c in done["auto"])),
        "accepted": accepted / max(1, accepted + rejected),
        "same texts": same / (streams * args.rounds),
    }


def _rate(seconds: float, done: Sequence[Completion]) -> float:
    first_s = max(completion.timings.ttft_ms or 0.0 for completion in done) / 1e3
    return sum(len(completion.tokens) - 1 for completion in done) / max(1e-6, seconds - first_s)


def _peer(path: Path, name: str, streams: int, args: argparse.Namespace) -> dict[str, Any]:
    server = program(LLAMA_SERVER)
    if server is None:
        return {"server off t/s": 0.0, "server on t/s": 0.0}
    with loaded(path, n_parallel=1, ctx_per_slot=CONTEXT) as model:
        work = WORKS[name](model, streams, args.new)
    rates = {}
    for mode in ("none", "ngram-simple"):
        command = ["-np", str(streams), "-c", str(streams * CONTEXT), "--spec-type", mode]
        with LlamaServer.start(server, path, *command) as peer:
            peer.complete_all(work.prompts, 4)
            seconds = [peer.complete_all(work.prompts, work.num_new)[0] for _ in range(args.rounds)]
        rates[mode] = streams * work.num_new / median(seconds)
    return {"server off t/s": rates["none"], "server on t/s": rates["ngram-simple"]}
