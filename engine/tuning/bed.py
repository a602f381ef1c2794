"""What a setup does: one load of the weights, a context for each setup, and the same seeded work for all."""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cellama.engine.core.embedder import Embedder
from cellama.engine.core.engine import Engine
from cellama.engine.errors import EngineError
from cellama.engine.models.tuned_options import Measured, Setup
from cellama.engine.options import EngineOptions
from cellama.engine.request import Request
from cellama.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from cellama.engine.llama import LlamaModel, Plan

log = logging.getLogger(__name__)


PROMPT_TOKENS, NEW_TOKENS = 128, 64
LEAST_REQUESTS = 16  # of a measurement; with more slots one for each
LEAST_PROMPT, LEAST_NEW = 16, 8  # tokens, for models that are too slow for more
CONTEXT = PROMPT_TOKENS + NEW_TOKENS  # tokens per slot
PROBE = Setup(threads=1, n_parallel=1, kv_layout="unified", n_ubatch=512)
FIRST_SHARE = 0.1  # of all seconds, for the first measurement
SHORTEST_S = 1.0  # of a measurement; shorter ones are repeated …
SHORTEST_SHARE = 0.03  # … as long as they take less than this of all seconds, too
NUM_TEXTS = 32
SEED = 0
GREEDY = SamplingParams(temperature=0)
BULK = 9  # priority
Round = tuple[float, float | None]  # seconds, milliseconds to the first token; None: it was not in time


@dataclass(frozen=True, slots=True)
class Work:
    """What each request of a measurement is."""

    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS


class Bed:
    """The weights, and one context at a time on them."""

    def __init__(self, weights: LlamaModel, options: EngineOptions, plan: Plan, started: float, seconds: float) -> None:
        self.work = Work()
        self._weights = weights
        self._options = replace(options, cache_prompt=False)
        self._uses = plan.uses
        self._seconds = seconds  # for everything
        self._deadline = started + seconds  # time.monotonic

    def measure(self, setup: Setup) -> Measured | None:
        """The best of a few rounds, if one was not enough; None if it does not work, or not in time."""
        started = time.monotonic()
        try:
            rate, ttft_ms = self._generate(setup) if self._uses.generates else (self._embed(setup), None)
        except EngineError as error:
            log.warning("%s can't be measured: %s", setup, error)
            return None
        return Measured(setup, rate, ttft_ms, time.monotonic() - started) if rate else None

    def size_work(self, threads: int, slots: int) -> None:
        """Shortens all requests if the first measurement would take too much of the time.

        All threads may be slower than half of them, where other programs run.
        """
        expected_s = min(self._expected_s(count, slots) for count in {threads, (threads + 1) // 2})
        share = min(1.0, FIRST_SHARE * self._seconds / max(expected_s, 1e-9))
        self.work = Work(max(LEAST_PROMPT, int(share * PROMPT_TOKENS)), max(LEAST_NEW, int(share * NEW_TOKENS)))

    def _expected_s(self, threads: int, slots: int) -> float:
        """About how long a measurement of the whole work takes, judged by one short request."""
        probe = Work(LEAST_PROMPT, LEAST_NEW)
        with self._engine(replace(PROBE, threads=threads)) as engine:
            engine.run(1, probe)
            seconds, ttft_ms = engine.run(1, probe)
        prompt_s = (ttft_ms or 0.0) / 1000 / probe.prompt_tokens
        new_s = max(0.0, seconds - (ttft_ms or 0.0) / 1000) / probe.new_tokens
        # Slots that generate together take a fraction of what they take one by one; a half is careful.
        return _num_requests(slots) * (prompt_s * PROMPT_TOKENS + new_s * NEW_TOKENS / min(2, slots))

    def _generate(self, setup: Setup) -> tuple[float, float | None]:
        """Tokens per second, read and generated, and milliseconds to the first one."""
        slots, work = setup.n_parallel or 1, self.work
        num_requests = _num_requests(slots)
        num_tokens = num_requests * (work.prompt_tokens + work.new_tokens)
        with self._engine(setup) as engine:
            engine.run(1, Work(LEAST_PROMPT, LEAST_NEW))
            rounds = self._rounds(lambda: engine.run(num_requests, work))
        whole = [round_ for round_ in rounds if round_[1] is not None]
        if not whole:
            return 0.0, None
        seconds, ttft_ms = min(whole, key=lambda round_: round_[0])
        return num_tokens / seconds, ttft_ms

    def _engine(self, setup: Setup) -> _Running:
        options = replace(
            self._options,
            threads=setup.threads,
            n_parallel=setup.n_parallel,
            kv_layout=setup.kv_layout or "auto",
            n_ubatch=setup.n_ubatch,
        )
        return _Running(self._weights, options, self._deadline)

    def _rounds(self, run: Callable[[], Round]) -> list[Round]:
        """One round, and more of them as long as all together are short."""
        rounds, shortest_s = [run()], min(SHORTEST_S, SHORTEST_SHARE * self._seconds)
        while sum(seconds for seconds, _ in rounds) < shortest_s and time.monotonic() < self._deadline:
            rounds.append(run())
        return rounds

    def _embed(self, setup: Setup) -> float:
        """Tokens per second."""
        from cellama.engine.llama import LlamaEmbeddingBackend

        options = replace(self._options, threads=setup.threads)
        pooling = "rank" if self._uses.ranks else self._uses.pooling
        embedder = Embedder(LlamaEmbeddingBackend(self._weights, options, pooling), name="tune")
        length = min(PROMPT_TOKENS, embedder.max_tokens)
        texts = _random_texts(NUM_TEXTS, length, self._weights.info.n_vocab)

        def run(texts: list[tuple[int, ...]]) -> Round:
            started = time.monotonic()
            embedder.submit(texts, normalize=False).future.result()
            return time.monotonic() - started, None

        try:
            run(texts[:4])
            seconds = min(seconds for seconds, _ in self._rounds(lambda: run(texts)))
        finally:
            embedder.close()
        return NUM_TEXTS * length / seconds


class _Running:
    """An engine with a setup, for the time of a `with` block."""

    def __init__(self, weights: LlamaModel, options: EngineOptions, deadline: float) -> None:
        """Raises ModelLoadFailed, InvalidRequest."""
        from cellama.engine.llama import LlamaBackend

        self._n_vocab = weights.info.n_vocab
        self._slots = options.num_slots
        self._deadline = deadline
        self._engine = Engine(LlamaBackend(weights, options), options, name="tune")

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def run(self, num_requests: int, work: Work) -> Round:
        """Seconds for so many requests at once, and the milliseconds until the first ones began to answer.

        These are None if the deadline came first.
        """
        started = time.monotonic()
        timeout_s = max(0.1, self._deadline - started)
        prompts = _random_texts(num_requests, work.prompt_tokens, self._n_vocab)
        requests = [
            Request(
                str(index),
                prompt,
                sampling=GREEDY,
                max_tokens=work.new_tokens,
                ignore_eos=True,
                timeout_s=timeout_s,
                priority=BULK,
                stream=False,
            )
            for index, prompt in enumerate(prompts)
        ]
        handles = [self._engine.submit(request) for request in requests]
        done = [handle.result() for handle in handles]
        seconds = time.monotonic() - started
        if any(completion.finish_reason != "length" for completion in done):
            return seconds, None
        first = sorted(completion.timings.ttft_ms or 0.0 for completion in done)[: self._slots]
        return seconds, statistics.median(first)


def _random_texts(count: int, length: int, n_vocab: int) -> list[tuple[int, ...]]:
    """Texts of tokens that are neither control tokens nor bytes in most vocabularies; the same in each measurement."""
    rng = random.Random(SEED)
    low = min(300, n_vocab // 2)
    return [tuple(rng.randrange(low, n_vocab) for _ in range(length)) for _ in range(count)]


def _num_requests(slots: int) -> int:
    return max(LEAST_REQUESTS, slots)
