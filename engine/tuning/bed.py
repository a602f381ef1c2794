"""What a setup does: one load of the weights, a context for each setup, the same seeded work for all (workload.py)."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cellama.engine.core.embedder import Embedder
from cellama.engine.core.engine import Engine
from cellama.engine.errors import EngineError
from cellama.engine.models.tuned_options import Measured, Setup
from cellama.engine.options import EngineOptions
from cellama.engine.request import Request
from cellama.engine.sampling_params import SamplingParams

from .workload import Work, num_requests, random_texts, requests

if TYPE_CHECKING:
    from cellama.engine.llama import LlamaModel, LoadPlan

log = logging.getLogger(__name__)

WHOLE, LEAST = Work(), Work(16, 8)  # the latter for models that are too slow for more
CONTEXT = WHOLE.most_tokens  # tokens per slot
PROBE = Setup(threads=1, n_parallel=1, kv_layout="unified", n_ubatch=512)
FIRST_SHARE = 0.1  # of all seconds, for the first measurement
SHORTEST_S = 1.0  # of a measurement; shorter ones are repeated …
SHORTEST_SHARE = 0.03  # … as long as they take less than this of all seconds, too
NUM_TEXTS, TEXT_TOKENS = 32, 128  # for embedding models
GREEDY = SamplingParams(temperature=0)
BULK = 9  # priority


class Round(NamedTuple):
    """One go at the work."""

    seconds: float
    num_tokens: int  # read, taken from other requests, and generated
    ttft_ms: float | None = None  # until the first token; None: it was not in time


class Bed:
    """The weights, and one context at a time on them."""

    def __init__(
        self, weights: LlamaModel, options: EngineOptions, plan: LoadPlan, started: float, seconds: float
    ) -> None:
        self.work = WHOLE
        self._weights = weights
        self._options = options
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
        prompt, new = int(share * WHOLE.prompt_tokens), int(share * WHOLE.new_tokens)
        self.work = Work(max(LEAST.prompt_tokens, prompt), max(LEAST.new_tokens, new))

    def _expected_s(self, threads: int, slots: int) -> float:
        """About how long a measurement of the whole work takes, judged by one short request."""
        with self._engine(replace(PROBE, threads=threads)) as engine:
            engine.run(1, LEAST)
            probe = engine.run(1, LEAST)
        prompt_s = (probe.ttft_ms or 0.0) / 1000 / LEAST.prompt_tokens
        new_s = max(0.0, probe.seconds - (probe.ttft_ms or 0.0) / 1000) / LEAST.new_tokens
        # Slots that generate together take a fraction of what they take one by one; a half is careful.
        return num_requests(slots) * (prompt_s * WHOLE.prompt_tokens + new_s * WHOLE.new_tokens / min(2, slots))

    def _generate(self, setup: Setup) -> tuple[float, float | None]:
        """Tokens per second, read and generated, and milliseconds to the first one."""
        count = num_requests(setup.n_parallel or 1)
        with self._engine(setup) as engine:
            engine.run(1, LEAST)
            rounds = self._rounds(lambda: engine.run(count, self.work))
        whole = [round_ for round_ in rounds if round_.ttft_ms is not None]
        if not whole:
            return 0.0, None
        best = max(whole, key=lambda round_: round_.num_tokens / round_.seconds)
        return best.num_tokens / best.seconds, best.ttft_ms

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
        while sum(round_.seconds for round_ in rounds) < shortest_s and time.monotonic() < self._deadline:
            rounds.append(run())
        return rounds

    def _embed(self, setup: Setup) -> float:
        """Tokens per second."""
        from cellama.engine.llama import LlamaEmbeddingBackend

        options = replace(self._options, threads=setup.threads)
        pooling = "rank" if self._uses.ranks else self._uses.pooling
        embedder = Embedder(LlamaEmbeddingBackend(self._weights, options, pooling), name="tune")
        length = min(TEXT_TOKENS, embedder.max_tokens)
        texts = random_texts(NUM_TEXTS, length, self._weights.info.n_vocab)

        def run(texts: list[tuple[int, ...]]) -> Round:
            started = time.monotonic()
            embedder.submit(texts, normalize=False).future.result()
            return Round(time.monotonic() - started, len(texts) * length)

        try:
            run(texts[:4])
            return max(round_.num_tokens / round_.seconds for round_ in self._rounds(lambda: run(texts)))
        finally:
            embedder.close()


class _Running:
    """An engine with a setup, for the time of a `with` block."""

    def __init__(self, weights: LlamaModel, options: EngineOptions, deadline: float) -> None:
        """Raises ModelLoadFailed, InvalidRequest."""
        from cellama.engine.llama import LlamaBackend

        self._n_vocab = weights.info.n_vocab
        self._slots = options.num_slots
        self._deadline = deadline
        self._num_runs = 0
        self._engine = Engine(LlamaBackend(weights, options), options, name="tune")

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def run(self, count: int, work: Work) -> Round:
        """So many requests at once. The time to the first token is the median of those that have a slot at once; it is
        None if the deadline came before the end."""
        self._num_runs += 1
        asked = [
            self._request(str(index), *each)
            for index, each in enumerate(requests(work, count, self._n_vocab, self._num_runs))
        ]
        started = time.monotonic()
        done = [handle.result() for handle in [self._engine.submit(request) for request in asked]]
        seconds = time.monotonic() - started
        num_tokens = sum(len(request.prompt) + (request.max_tokens or 0) for request in asked)
        if any(completion.finish_reason != "length" for completion in done):
            return Round(seconds, num_tokens)
        first = sorted(completion.timings.ttft_ms or 0.0 for completion in done)[: self._slots]
        return Round(seconds, num_tokens, statistics.median(first))

    def _request(self, name: str, prompt: tuple[int, ...], num_new: int) -> Request:
        timeout_s = max(0.1, self._deadline - time.monotonic())
        ends: dict[str, Any] = {"max_tokens": num_new, "ignore_eos": True, "timeout_s": timeout_s}
        return Request(name, prompt, GREEDY, priority=BULK, stream=False, **ends)
