"""Tests that every slot gets its own row of logits, and the likeliest token of this row, in any order."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from cellama.engine import EngineOptions, SamplingParams
from cellama.engine.backend import Chunk
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama.backend import LlamaBackend
from cellama.engine.llama.model import LlamaModel

SLOTS = 4
STEPS = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 3], [1, 2], [2], [0, 1, 3]]  # slots that decode in each call


@pytest.fixture
def backend() -> Iterator[LlamaBackend]:
    options = EngineOptions(threads=1, n_parallel=SLOTS, ctx_per_slot=256, kv_layout="partitioned")
    backend = LlamaBackend(LlamaModel(TINY_PATH), options)
    yield backend
    backend.close()


def decode(backend: LlamaBackend, slots: list[int], lengths: list[int]) -> list[int]:
    """Decode chunks of different lengths in these slots, and return the batch index of each slot's last token."""
    chunks = [Chunk(slot, lengths[slot], [40 + slot + i for i in range(1 + slot % 2)], True) for slot in slots]
    backend.decode(chunks)
    for chunk in chunks:
        lengths[chunk.slot] += len(chunk.tokens)
    return list(np.cumsum([len(chunk.tokens) for chunk in chunks]) - 1)


@pytest.mark.parametrize("num_greedy", [SLOTS, 1])
def test_slots_read_their_own_output_rows(backend: LlamaBackend, num_greedy: int) -> None:
    plan, lengths = backend.prepare(SamplingParams(temperature=0)), [0] * SLOTS
    for slots in STEPS:
        rows = decode(backend, slots, lengths)
        samplers = [(backend.new_sampler(plan, 0, (), ban_end=False), slot) for slot in slots[:num_greedy]]
        backend.presample(samplers)  # finds all tokens together if most samplers are greedy
        found = [backend.likeliest(slot) for slot in slots]
        for slot, row in zip(slots, rows, strict=True):
            address = lib.llama_get_logits_ith(backend.context, int(row))
            expected = np.ctypeslib.as_array(address, (backend.n_vocab,))
            assert (backend.logits(slot) == expected).all()
        assert found == [int(backend.logits(slot).argmax()) for slot in slots]
    with pytest.raises(KeyError):
        backend.logits(2)


def test_greedy_sampler_never_samples_a_banned_end_token(backend: LlamaBackend) -> None:
    plan, lengths = backend.prepare(SamplingParams(temperature=0)), [0] * SLOTS
    (end,) = list(backend.vocabulary.end_tokens)[:1]
    for _ in range(3):
        decode(backend, [0, 1], lengths)
        backend.logits(0)[end] = np.inf
        assert backend.new_sampler(plan, 0, (), ban_end=False).sample(0)[0] == end
        second = backend.logits(0).copy()
        second[sorted(backend.vocabulary.end_tokens)] = -np.inf
        assert backend.new_sampler(plan, 0, (), ban_end=True).sample(0)[0] == int(second.argmax())
        backend.likeliest(1)
