"""Measure setups of a model.

The weights are loaded once. Each setup is measured with its own context and the same requests. Unlike real requests,
requests of equal length all end at the same time. A setup that handles such requests well may be slow when slots become
free one by one. Therefore, half of the requests have lognormal lengths. A third of this half starts with one of a few
shared prefixes, like requests with the same instructions.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cellama.config.logging import event_logger
from cellama.engine.core.embedder import Embedder
from cellama.engine.core.engine import Engine
from cellama.engine.errors import EngineError, InsufficientMemory, InvalidRequest, ModelLoadFailed
from cellama.engine.memory.budget import Budget, MemoryBudget, readable
from cellama.engine.models.sources import HubOptions, resolve
from cellama.engine.models.tuned_options import Measurement, Setup
from cellama.engine.options import DEFAULT_SLOTS, DEFAULT_UBATCH, Capability, EngineOptions
from cellama.engine.request import Request, SamplingParams
from cellama.engine.system.processors import available_cores

from .sweep import MAX_SLOTS, Sweep, SweepLimits

if TYPE_CHECKING:
    from cellama.engine.llama import LlamaModel, LoadPlan

log = event_logger(__name__)

MIN_REQUESTS = 32  # requests per measurement, or two per slot if that is more, so that each slot is used twice
NUM_HEADS = 3  # shared prefixes, which a third of the mixed requests use in turn
SPREAD = 0.6  # sigma of the lognormal lengths: an eighth are below half the median, an eighth above twice the median


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """The prompt and output lengths of half of the requests.

    The other half has about the same mean lengths, and no request is more than twice as long.
    """

    prompt_tokens: int = 64
    new_tokens: int = 32

    @property
    def max_tokens(self) -> int:
        """The context size that the longest request needs, in tokens."""
        return 2 * (self.prompt_tokens + self.new_tokens)


def num_requests(slots: int) -> int:
    return max(MIN_REQUESTS, 2 * slots)


def requests(lengths: RequestLengths, count: int, n_vocab: int, round_: int = 0) -> list[tuple[tuple[int, ...], int]]:
    """Return prompts, each with the number of tokens to generate. The same arguments always produce the same result.

    Prompts of different rounds never share a prefix, so no prompt is cached from an earlier round.
    """
    rng = random.Random(f"0 {round_}")
    low = min(300, n_vocab // 2)  # in most vocabularies, smaller ids are control tokens and bytes

    def words(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(low, n_vocab) for _ in range(length))

    def mixed(mean: int) -> int:
        return max(1, min(round(mean * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)), 2 * mean))

    prompt_tokens, new_tokens = lengths.prompt_tokens, lengths.new_tokens
    heads = [words(prompt_tokens) for _ in range(NUM_HEADS)]
    found: list[tuple[tuple[int, ...], int]] = []
    for index in range(count):
        number, is_mixed = divmod(index, 2)
        if not is_mixed:
            found.append((words(prompt_tokens), new_tokens))
        elif number % 3:
            found.append((words(mixed(prompt_tokens)), mixed(new_tokens)))
        else:
            head = heads[number // 3 % NUM_HEADS]
            found.append((head + words(mixed((prompt_tokens + 1) // 2)), mixed(new_tokens)))
    return found


USUAL = RequestLengths()
SHORTEST = RequestLengths(prompt_tokens=16, new_tokens=8)  # for models that are too slow for the usual lengths
FIRST_SHARE = 0.1  # share of all seconds for the first measurement: about ten more must follow
ROUNDS_S = 1.0  # seconds of a measurement; shorter rounds are repeated, because a second evens out noise
ROUNDS_SHARE = 0.03  # share of all seconds that the repetitions may take
NUM_TEXTS, TEXT_TOKENS = 32, 128  # texts, and tokens per text, for measuring an embedding model: paragraphs
BULK_PRIORITY = 9


class MeasuredRound(NamedTuple):
    """The result of running all requests once."""

    seconds: float
    num_tokens: int  # prompt tokens, computed or cached, and generated tokens
    ttft_ms: float | None = None  # time to the first token


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of `tune`. `rows` are in the order of measurement."""

    fingerprint: str
    description: str
    generates: bool
    work: RequestLengths
    rows: tuple[Measurement, ...]
    chosen: Measurement
    num_skipped: int  # setups that were not measured for lack of time
    took_s: float
    load: float  # load of the cores before the measurement, as a share; above 1 if programs waited; 0 if unknown


def tune(
    source: str,
    *,
    options: EngineOptions,
    hub: HubOptions,
    capabilities: Iterable[Capability] | None = None,
    seconds: float = 150.0,
    max_threads: int | None = None,
    max_slots: int = MAX_SLOTS,
    memory: MemoryBudget = "auto",
    on_row: Callable[[Measurement], None] = lambda row: None,
) -> Tuning:
    """Measure a model for about `seconds`, not including the download from the Hub.

    All `options` except n_parallel, n_ubatch, threads, kv_layout and the context size apply to every measurement.
    The number of slots is limited so that the model fits into `memory`. Raises ModelLoadFailed, InsufficientMemory,
    WrongCapability or InvalidRequest.
    """
    from cellama.engine.llama import LlamaModel

    if seconds <= 0 or max_slots < 1 or (max_threads is not None and max_threads < 1):
        raise InvalidRequest("seconds, max_slots and max_threads must be above 0")
    options = replace(options, n_parallel=None, n_ubatch=None, threads=None, kv_layout="auto")
    options = replace(options, n_ctx=None, ctx_per_slot=USUAL.max_tokens, cache_dir=None)
    path = resolve(source, hub)
    load, started = _load(), time.monotonic()
    requested = None if capabilities is None else frozenset(capabilities)
    plan, slots = _plan(path, options, requested, min(max_slots, MAX_SLOTS, options.n_batch), memory)
    threads = min(max_threads or available_cores(), available_cores())
    weights = LlamaModel(path, options)
    try:
        rig = TuningRig(weights, options, plan, started, seconds)

        def measure(setup: Setup) -> Measurement | None:
            row = rig.measure(setup)
            if row is not None:
                on_row(row)
            return row

        limits = SweepLimits(threads, slots=slots, step_tokens=options.n_batch, generates=plan.uses.generates)
        sweep = Sweep(measure, limits, started + seconds)
        if plan.uses.generates:
            rig.fit_lengths(threads, min(DEFAULT_SLOTS, slots))
        chosen = sweep.run()
    finally:
        weights.close()
    if chosen is None:
        raise ModelLoadFailed(f"{source!r}: no configuration could be measured within {seconds:g} s; allow more time")
    return Tuning(
        fingerprint=weights.info.fingerprint,
        description=weights.info.description,
        generates=plan.uses.generates,
        work=rig.lengths,
        rows=tuple(sweep.rows),
        chosen=chosen,
        num_skipped=len(sweep.skipped),
        took_s=time.monotonic() - started,
        load=load,
    )


def _load() -> float:
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows
        return 0.0


def _plan(
    path: Path,
    options: EngineOptions,
    capabilities: frozenset[Capability] | None,
    slots: int,
    memory_budget: MemoryBudget,
) -> tuple[LoadPlan, int]:
    """Return the model file's load plan, and the number of slots that fit.

    Raises InsufficientMemory if not even one slot fits.
    """
    from cellama.engine.llama import devices, plan_load

    memory = Budget(memory_budget, devices).available()
    while True:
        plan = plan_load("tune", path, replace(options, n_parallel=slots), capabilities, memory)
        shortage = memory.shortage(plan.footprint)
        if shortage is None:
            return plan, slots
        if slots == 1:
            needed, available = shortage.required_bytes, shortage.available_bytes
            raise InsufficientMemory(
                f"{str(path)!r} needs {readable(needed)} on {shortage.device}, but only {readable(available)} are "
                "available; unload other models, or stop other programs",
                *(shortage.device, needed, available),
            )
        slots //= 2


class TuningRig:
    """Measures setups one at a time, each with its own context and the same weights."""

    def __init__(
        self, weights: LlamaModel, options: EngineOptions, plan: LoadPlan, started: float, seconds: float
    ) -> None:
        self.lengths = USUAL
        self._weights = weights
        self._options = options
        self._uses = plan.uses
        self._seconds = seconds  # for all measurements
        self._deadline = started + seconds  # time.monotonic
        self._num_rounds = 0

    def measure(self, setup: Setup) -> Measurement | None:
        """Measure a few rounds and return the best result, or None if the setup fails or takes too long.

        The best round is used, because other programs can only make a round slower.
        """
        started = time.monotonic()
        try:
            rounds = self._generate(setup, self.lengths) if self._uses.generates else self._embed(setup)
        except EngineError as error:
            log.warning("configuration not measured", setup=str(setup), error=str(error))
            return None
        if not rounds:
            return None
        best = max(rounds, key=lambda each: each.num_tokens / each.seconds)
        return Measurement(
            setup,
            tokens_per_s=best.num_tokens / best.seconds,
            ttft_ms=best.ttft_ms,
            took_s=time.monotonic() - started,
        )

    def fit_lengths(self, threads: int, slots: int) -> None:
        """Shorten all requests if the first measurement would otherwise take too long.

        The duration is estimated from one short request.
        """
        probe = self._generate(
            Setup(threads, n_parallel=1, kv_layout="unified", n_ubatch=DEFAULT_UBATCH), SHORTEST, count=1
        )
        if not probe:
            return
        prompt_s = (probe[-1].ttft_ms or 0.0) / 1000
        new_s = max(0.0, probe[-1].seconds - prompt_s)
        prompts_s = prompt_s * USUAL.prompt_tokens / SHORTEST.prompt_tokens
        # Slots that generate together need a fraction of the time that they need one by one; a half is conservative.
        news_s = new_s * USUAL.new_tokens / SHORTEST.new_tokens / min(2, slots)
        expected_s = num_requests(slots) * (prompts_s + news_s)
        share = min(1.0, FIRST_SHARE * self._seconds / max(expected_s, 1e-9))
        self.lengths = RequestLengths(
            prompt_tokens=max(SHORTEST.prompt_tokens, int(share * USUAL.prompt_tokens)),
            new_tokens=max(SHORTEST.new_tokens, int(share * USUAL.new_tokens)),
        )

    def _generate(self, setup: Setup, lengths: RequestLengths, count: int | None = None) -> list[MeasuredRound]:
        from cellama.engine.llama import LlamaBackend

        options = replace(
            self._options,
            threads=setup.threads,
            n_parallel=setup.n_parallel,
            kv_layout=setup.kv_layout or "auto",
            n_ubatch=setup.n_ubatch,
        )
        count = count or num_requests(options.num_slots)
        engine = Engine(LlamaBackend(self._weights, options), options, name="tune")
        try:
            self._round(engine, SHORTEST, 1, options.num_slots)  # one-time costs of the first request
            return self._repeated(lambda: self._round(engine, lengths, count, options.num_slots))
        finally:
            engine.close()

    def _round(self, engine: Engine, lengths: RequestLengths, count: int, slots: int) -> MeasuredRound | None:
        """Run all requests, or return None if the deadline passes.

        `ttft_ms` is the median over requests that don't wait.
        """
        self._num_rounds += 1
        timeout_s = max(0.1, self._deadline - time.monotonic())
        batch = [
            Request(
                str(index),
                prompt,
                SamplingParams(temperature=0),
                priority=BULK_PRIORITY,
                stream=False,
                max_tokens=num_new,
                ignore_eos=True,
                timeout_s=timeout_s,
            )
            for index, (prompt, num_new) in enumerate(
                requests(lengths, count, self._weights.info.n_vocab, self._num_rounds)
            )
        ]
        started = time.monotonic()
        done = [handle.result() for handle in [engine.submit(request) for request in batch]]
        seconds = time.monotonic() - started
        if any(completion.finish_reason != "length" for completion in done):
            return None
        num_tokens = sum(len(request.prompt) + (request.max_tokens or 0) for request in batch)
        first = sorted(completion.timings.ttft_ms or 0.0 for completion in done)[:slots]
        return MeasuredRound(seconds, num_tokens, statistics.median(first))

    def _embed(self, setup: Setup) -> list[MeasuredRound]:
        from cellama.engine.llama import LlamaEmbeddingBackend

        options = replace(self._options, threads=setup.threads)
        pooling = "rank" if self._uses.ranks else self._uses.pooling
        embedder = Embedder(LlamaEmbeddingBackend(self._weights, options, pooling), name="tune")
        lengths = RequestLengths(min(TEXT_TOKENS, embedder.max_tokens), 1)
        texts = [prompt for prompt, _ in requests(lengths, 2 * NUM_TEXTS, self._weights.info.n_vocab)[::2]]

        def run(texts: list[tuple[int, ...]]) -> MeasuredRound:
            started = time.monotonic()
            embedder.submit(texts, normalize=False).future.result()
            return MeasuredRound(time.monotonic() - started, sum(map(len, texts)))

        try:
            run(texts[:4])
            return self._repeated(lambda: run(texts))
        finally:
            embedder.close()

    def _repeated(self, run: Callable[[], MeasuredRound | None]) -> list[MeasuredRound]:
        """Run rounds until their total duration is long enough or the deadline passes."""
        rounds: list[MeasuredRound] = []
        enough_s = min(ROUNDS_S, ROUNDS_SHARE * self._seconds)
        while (round_ := run()) is not None:
            rounds.append(round_)
            if sum(each.seconds for each in rounds) >= enough_s or time.monotonic() >= self._deadline:
                break
        return rounds
