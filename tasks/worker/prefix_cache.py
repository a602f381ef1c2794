"""Describe a worker's prefix caches to the ledger, which then prefers to give the worker jobs with these prefixes."""

from __future__ import annotations

from cellama.engine import Completion, Model, ModelManager
from cellama.tasks.state.ledger import Ledger, WorkerCache

BYTES_PER_TOKEN = 4.0  # of English text
INITIAL_RATE = 500.0  # prompt tokens per second, until a prompt was measured
MIN_MEASURED = 256  # computed prompt tokens; shorter prompts say little about the rate
MEMORY = 0.2  # weight of the latest prompt


class PrefixCache:
    """The caches of all models of a worker process. Thread-safe."""

    def __init__(self, ledger: Ledger, worker: str, manager: ModelManager) -> None:
        """Describe the caches of a worker. `worker` is the same name that is passed to `Ledger.begin`."""
        self._ledger = ledger
        self._worker = worker
        self._manager = manager
        self._rate = INITIAL_RATE
        self._is_measured = False
        self._num_tokens = 0.0
        self._measure()

    def __call__(self) -> WorkerCache:
        """Return the current size and speed of the caches."""
        return WorkerCache(self._worker, BYTES_PER_TOKEN * self._num_tokens, BYTES_PER_TOKEN * self._rate)

    def observe(self, completion: Completion) -> None:
        """Update the measured prefill rate from a request that has ended."""
        usage, rate = completion.usage, completion.timings.prompt_eval_rate
        if rate and usage.prompt_tokens - usage.cached_tokens >= MIN_MEASURED:
            self._rate += (MEMORY if self._is_measured else 1.0) * (rate - self._rate)
            self._is_measured = True

    def keep(self) -> None:
        """Report that the cache still exists, and measure its size again, because models may have changed.

        Raises RedisError.
        """
        self._measure()
        self._ledger.keep_cache(self._worker)

    def forget(self) -> None:
        """Remove the record of the cache, because the worker is stopping. Raises RedisError."""
        self._ledger.forget_cache(self._worker)

    def _measure(self) -> None:
        self._num_tokens = sum(_num_tokens(model) for model in self._manager.models().values())


def _num_tokens(model: Model) -> float:
    """Return how many tokens fit on the device and in RAM."""
    if not model.capabilities & {"generate", "chat"}:
        return 0.0
    uses = model.memory.devices.values()
    kv_bytes, saved_bytes = sum(use.kv_bytes for use in uses), sum(use.saved_bytes for use in uses)
    return model.engine.snapshot().kv_total_tokens * (1 + saved_bytes / kv_bytes if kv_bytes else 1)
