"""Load the engine under test, run seeded workloads on it, and measure its steps."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellama.bench.models.padded import write_padded
from cellama.bench.models.synthetic import Shape, write_model
from cellama.engine import (
    Completion,
    EngineOptions,
    Event,
    Handle,
    Model,
    ModelManager,
    Request,
    SamplingParams,
    StepStats,
    Text,
)
from cellama.engine.memory.open_sizes import STREAM_PADDING

GREEDY = SamplingParams(temperature=0)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
FIRST_WORD, LAST_WORD = 300, 1000  # neither control tokens nor bytes, and in every vocabulary, the bundled one's too


def model_path(given: Path | None) -> Path:
    """Return the model file for a benchmark, which is the given file or a 174M model with random weights."""
    return given.absolute() if given else cached_model("synthetic-174m-q8_0.gguf", Shape(), "Q8_0")


def cached_model(name: str, shape: Shape, file_type: str) -> Path:
    """Return a model file with random weights from the cache directory. A missing file is written first."""
    return _cached(name, lambda path: write_model(path, shape, file_type=file_type))


def padded_model() -> Path:
    """Return the bundled model, padded until it is as slow as a 160M model. The file is written once."""
    return _cached("padded-160m-q8_0.gguf", lambda path: write_padded(path, 160.0))


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellama"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        write(partial)
        partial.rename(path)
    return path


def context(slots: int, prompt: int, new: int) -> int:
    """Return the number of tokens in all KV streams for requests of these lengths, including llama.cpp's padding."""
    return -(-(prompt + new) // STREAM_PADDING) * STREAM_PADDING * slots


@contextlib.contextmanager
def loaded(path: Path, **options: Any) -> Iterator[Model]:
    """Load the model into an engine with these options, by default on all cores."""
    with loaded_each(path, bench=options) as models:
        yield models["bench"]


@contextlib.contextmanager
def loaded_each(path: Path, **options: Mapping[str, Any]) -> Iterator[dict[str, Model]]:
    """Load the model into several engines with different options, and yield them keyed by name."""
    manager = ModelManager()
    try:
        yield {
            name: manager.load(
                name, str(path), options=EngineOptions(**{"threads": CORES, **own}), capabilities=["generate"]
            )
            for name, own in options.items()
        }
    finally:
        manager.close()


def random_prompts(count: int, length: int, *, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Return prompts of `length` random tokens. The first `shared` tokens of all prompts are the same."""
    rng = random.Random(seed)

    def words(number: int) -> list[int]:
        return [rng.randrange(FIRST_WORD, LAST_WORD) for _ in range(number)]

    head = words(shared)
    return [head + words(length - shared) for _ in range(count)]


def run_all(
    model: Model, prompts: Sequence[Sequence[int]], num_new: int | Sequence[int], **params: Any
) -> tuple[float, list[Completion]]:
    """Run all prompts concurrently for exactly `num_new` greedy tokens.

    Return the seconds until the last request has finished, and the completions.
    """
    lengths = [num_new] * len(prompts) if isinstance(num_new, int) else num_new
    requests = [
        Request(str(i), tuple(prompt), **{"sampling": GREEDY, "max_tokens": length, "ignore_eos": True, **params})
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    started = time.monotonic()
    handles = submit_together(model, requests)
    completions = [handle.result() for handle in handles]
    return time.monotonic() - started, completions


def submit_together(
    model: Model, requests: Iterable[Request], new_listener: Callable[[], Callable[[Event], None] | None] = lambda: None
) -> list[Handle]:
    """Submit requests together, so that the engine receives all of them before its next step."""
    with model.engine._inbox._changed:
        return [model.engine.submit(request, new_listener()) for request in requests]


@dataclass(frozen=True, slots=True)
class Together:
    """The results of concurrent requests, measured from the moment when all requests have their first token."""

    seconds: float
    num_tokens: int
    completions: Sequence[Completion]

    @property
    def rate(self) -> float:
        """Return the tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def num_accepted(self) -> int:
        """Return the number of accepted draft tokens."""
        return sum(completion.usage.accepted_prediction_tokens for completion in self.completions)

    @property
    def num_rejected(self) -> int:
        """Return the number of rejected draft tokens."""
        return sum(completion.usage.rejected_prediction_tokens for completion in self.completions)


def run_together(model: Model, requests: Sequence[Request]) -> Together:
    """Run requests concurrently until all have finished."""
    came: list[list[tuple[float, int]]] = [[] for _ in requests]  # when how many tokens of a request came
    listeners = iter([_listener(entries) for entries in came])
    handles = submit_together(model, requests, listeners.__next__)
    completions = [handle.result() for handle in handles]
    began, ended = max(entries[0][0] for entries in came), max(entries[-1][0] for entries in came)
    num_tokens = sum(count for entries in came for at, count in entries if at > began)
    return Together(max(ended - began, 1e-6), num_tokens, completions)


def _listener(entries: list[tuple[float, int]]) -> Callable[[Event], None]:
    def note(event: Event) -> None:
        if isinstance(event, Text) and event.tokens:
            entries.append((time.monotonic(), len(event.tokens)))

    return note


def warm_up(model: Model) -> None:
    """Run a short request to load weights and cells into memory."""
    run_all(model, [[FIRST_WORD + i for i in range(16)]], 4, cache_prompt=False)


@contextlib.contextmanager
def steps_of(model: Model) -> Iterator[list[StepStats]]:
    """Collect the statistics of the engine's steps within the `with` block."""
    steps: list[StepStats] = []
    on_step = model.engine._core.telemetry.on_step
    on_step.append(steps.append)
    try:
        yield steps
    finally:
        on_step.remove(steps.append)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the quantile of the values at `share`, using the nearest-rank method."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
