"""Tests of a model's logits processors, given by import path, with the real llama.cpp."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cellama.engine import (
    Completion,
    EngineOptions,
    InvalidRequest,
    LogitsProcessor,
    Model,
    ModelManager,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceStart,
)

PATIENCE_S = 60


def complete(model: Model, **sampling: Any) -> Completion:
    request = Request("r", tuple(model.tokenize("Once upon a time")), SamplingParams(**sampling), max_tokens=40)
    return model.engine.submit(request).result(PATIENCE_S)


class AtLeastTenTokens:
    """The example of docs/how-to/library.md."""

    def __init__(self, start: SequenceStart) -> None:
        self._ends, self._num_sampled = sorted(start.end_tokens), start.num_sampled

    def apply(self, logits: NDArray[np.float32]) -> None:
        if self._num_sampled < 10:
            logits[self._ends] = -np.inf

    def accept(self, token: int) -> None:
        self._num_sampled += 1


class Failing(AtLeastTenTokens):
    def apply(self, logits: NDArray[np.float32]) -> None:
        raise ArithmeticError("no logits")


def failing_if_hot(start: SequenceStart) -> LogitsProcessor | None:
    return Failing(start) if start.params.temperature > 1 else None


def test_logits_processors_apply_and_a_failing_processor_fails_only_its_request() -> None:
    own = (f"{__name__}:AtLeastTenTokens", f"{__name__}:failing_if_hot")
    options = EngineOptions(n_parallel=2, threads=1, logits_processors=own)
    with closing(ModelManager()) as manager:
        model = manager.load("tiny", "bundled://tiny", options=options, capabilities=["generate"])
        (end,) = list(model.engine.vocabulary.end_tokens)[:1]  # type: ignore[attr-defined]
        for sampling in ({"temperature": 0}, {"seed": 1}):
            wish = {"logit_bias": ((end, 1000.0),), **sampling}
            assert len(complete(model, **wish).tokens) == 10
            assert len(complete(model, **sampling).tokens) > 10
        with pytest.raises(RequestFailed, match="no logits"):
            complete(model, temperature=1.5)
        assert len(complete(model, **wish).tokens) == 10


@pytest.mark.parametrize(
    ("path", "message"),
    [("no.such:thing", "can't be imported: No module"), (f"{__name__}:PATIENCE_S", "is not callable")],
)
def test_load_fails_when_a_logits_processor_cannot_be_imported(path: str, message: str) -> None:
    with closing(ModelManager()) as manager, pytest.raises(InvalidRequest, match=message):
        manager.load("tiny", "bundled://tiny", options=EngineOptions(threads=1, logits_processors=(path,)))
