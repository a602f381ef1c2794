"""Reported log-probabilities have the texts of their tokens: engine/request.py."""

from __future__ import annotations

from cellama.engine import TokenLogprob
from cellama.engine.request import text_of_bytes, with_texts


def test_logprobs_contain_the_texts_of_chosen_and_alternative_tokens() -> None:
    pieces = [b"a", "ä".encode(), b"\xe2\x82"]
    entry = with_texts(TokenLogprob(1, -0.5, ((1, -0.5), (2, -1.0))), lambda token: pieces[token])
    assert (entry.text, entry.top_texts, entry.logprob) == ("ä", ("ä", "bytes:\\xe2\\x82"), -0.5)


def test_invalid_utf8_is_written_as_bytes() -> None:
    assert text_of_bytes(b"") == ""
    assert text_of_bytes(b"\xe2\x82") == "bytes:\\xe2\\x82"
