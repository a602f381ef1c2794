"""Reported probabilities have the texts of their tokens: engine/logprobs.py."""

from __future__ import annotations

from cellama.engine import SamplingParams
from cellama.engine.logprobs import text_of_bytes

from ..conftest import MakeEngine, request
from .core.test_engine import PATIENCE_S


def test_logprobs_have_the_texts_of_chosen_and_of_other_tokens(make_engine: MakeEngine) -> None:
    engine, backend = make_engine()
    asked = request(sampling=SamplingParams(temperature=0, logprobs=2), max_tokens=4)
    completion = engine.submit(asked).result(PATIENCE_S)
    entries = completion.logprobs or ()
    assert "".join(entry.text for entry in entries) == completion.text
    for entry in entries:
        assert entry.top_texts == tuple(text_of_bytes(backend.token_bytes(token)) for token, _ in entry.top)


def test_bytes_that_are_no_text_are_written_as_such() -> None:
    assert text_of_bytes("ä".encode()) == "ä"
    assert text_of_bytes(b"\xe2\x82") == "bytes:\\xe2\\x82"
