"""A text may differ from its reference only from a near tie on."""

from __future__ import annotations

import pytest

from cellama.bench.harness.reference_texts import NEAR_TIE, reference_texts
from cellama.engine import Tokenizer

TINY = "bundled://tiny"
TEXT = "Once upon a time, there was a little fox."


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    with Tokenizer(TINY) as tokenizer:
        return list(tokenizer.tokenize(TEXT, add_special=False))


def result(tokens: list[int], tie: int | None) -> dict[str, object]:
    margins = [NEAR_TIE / 2 if index == tie else 2 * NEAR_TIE for index in range(len(tokens))]
    entries = [
        {"token": token, "logprob": -0.1, "top": [[token, -0.1], [0, -0.1 - margin]]}
        for token, margin in zip(tokens, margins, strict=True)
    ]
    with Tokenizer(TINY) as tokenizer:
        return {"text": tokenizer.detokenize(tokens), "logprobs": entries}


def test_text_that_differs_at_a_near_tie_counts_as_tied(tokens: list[int]) -> None:
    tie = 4
    (expected,) = reference_texts([result(tokens, tie)], TINY)
    start = expected.ties[0][0]
    assert expected.compare(expected.text) == "same"
    assert expected.compare(expected.text[:start] + "#" + expected.text[start + 1 :]) == "tied"
    assert expected.compare("#" + expected.text[1:]) == "other"
    assert expected.compare(expected.text[:-1] + "#") == "other"


def test_token_more_likely_than_the_chosen_token_is_not_a_tie(tokens: list[int]) -> None:
    found, end = result(tokens, 4), [2, -0.001]  # an end-of-text token where the text continues
    found["logprobs"][4]["top"].insert(0, end)  # type: ignore[index]
    (expected,) = reference_texts([found], TINY)
    (plain,) = reference_texts([result(tokens, 4)], TINY)
    assert expected.ties == plain.ties != []


def test_short_or_duplicated_text_counts_as_wrong(tokens: list[int]) -> None:
    (expected,) = reference_texts([result(tokens, None)], TINY)
    assert expected.compare("") == "other"
    assert expected.compare(expected.text[:-5]) == "other"
    assert expected.compare(expected.text + expected.text) == "other"
