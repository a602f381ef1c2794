"""What a load would take if every pass of llama.cpp were a full one: the measure of scheduling.

The rates are those of the same engine in the same run: of steps that decode in every slot and read nothing, at the
load's mean context; and of steps that read as many prompt tokens as a step may and decode nothing, at their mean
position. The work is what no engine can do without: each different prefix once, and every generated token but the first
of each request, which comes from the pass that ends its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellama.bench.harness.engines import loaded, random_prompts, run_all, steps_of, warm_up
from cellama.bench.harness.mixed_load import Sizes
from cellama.engine import Model, StepStats

NUM_STEPS = 32  # of decoding
NUM_PREFILL_STEPS = 8
OWN_TOKENS = 8  # of a prompt in the measurement of decoding; the rest all share, so that they begin together
FULL = 0.95  # of the fullest step


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of full passes."""

    decode: float
    prefill: float

    def seconds(self, load: Sizes) -> float:
        """That the load needs at least."""
        return load.decode_tokens / self.decode + load.trie_tokens / self.prefill


def measure(path: Path, load: Sizes, options: dict[str, Any], seed: int) -> Rates:
    """Loads the model with these options. Raises RuntimeError if no step is full."""
    with loaded(path, **options) as model:
        warm_up(model)
        return Rates(_decode_rate(model, load, options["n_parallel"], seed), _prefill_rate(model, load, seed))


def _decode_rate(model: Model, load: Sizes, slots: int, seed: int) -> float:
    length = max(2 * OWN_TOKENS, load.mean_context - NUM_STEPS // 2)
    prompts = random_prompts(slots, length, shared=length - OWN_TOKENS, seed=seed)
    run_all(model, prompts[:1], 1)
    with steps_of(model) as steps:
        run_all(model, prompts, NUM_STEPS, priority=9, stream=False)
    return _rate("decode", [step for step in steps if step.decode_tokens == slots and not step.prefill_tokens])


def _prefill_rate(model: Model, load: Sizes, seed: int) -> float:
    length = max(OWN_TOKENS, 2 * load.mean_position)
    budget = model.options.pass_tokens
    prompts = random_prompts(-(-NUM_PREFILL_STEPS * budget // length), length, seed=seed + 1)
    with steps_of(model) as steps:
        run_all(model, prompts, 1, priority=9, stream=False, cache_prompt=False)
    alone = [step for step in steps if step.prefill_tokens and not step.decode_tokens]
    most = max((step.prefill_tokens for step in alone), default=0)
    return _rate("prefill", [step for step in alone if step.prefill_tokens >= FULL * most])


def _rate(what: str, steps: Iterable[StepStats]) -> float:
    steps = list(steps)
    if not steps:
        raise RuntimeError(f"no step was full of {what} tokens, so there is no rate of full passes; try fewer slots")
    return sum(step.batch_size for step in steps) / sum(step.step_ms for step in steps) * 1e3
