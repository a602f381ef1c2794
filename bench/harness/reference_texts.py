"""Compare texts with the greedy texts of an undisturbed run, and allow differences at near ties.

llama.cpp's rounding depends on the number of tokens in a pass, and faults change the number of concurrent jobs.
If the two most likely tokens are about equally likely, either token is correct, and the rest of the text depends on the
choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from cellama.engine import Tokenizer

# Difference of log-probabilities below which two tokens count as nearly tied. Tokens that were prefilled again differ
# by up to 0.011 (bundled model).
NEAR_TIE = 0.05
LOGPROBS = 5  # that the jobs of the run without trouble ask for: a few may be ends, which `ignore_eos` forbids


class ReferenceText(NamedTuple):
    """A text and its near ties."""

    text: str
    ties: Sequence[tuple[int, int]]  # characters among which a text that goes another way at the tie first differs

    def compare(self, text: str) -> Literal["same", "tied", "other"]:
        """Return "same" if the texts are equal, "tied" if they first differ at a near tie, and otherwise "other"."""
        if text == self.text:
            return "same"
        place = self.place_of_difference(text)
        return "tied" if any(start <= place < end for start, end in self.ties) else "other"

    def place_of_difference(self, text: str) -> int:
        """Return the index of the first character that differs from `text`."""
        pairs = zip(self.text, text, strict=False)
        return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(self.text), len(text)))


def reference_texts(results: Iterable[Any], source: str) -> list[ReferenceText]:
    """Return the texts and near ties of jobs that requested LOGPROBS, with the vocabulary of the model at `source`."""
    with Tokenizer(source) as tokenizer:
        return [_reference_text(result, tokenizer) for result in results]


def _reference_text(result: Any, tokenizer: Tokenizer) -> ReferenceText:
    tokens = [entry["token"] for entry in result["logprobs"]]
    margins = [_margin(entry["logprob"], [logprob for _, logprob in entry["top"]]) for entry in result["logprobs"]]
    near = [index for index, margin in enumerate(margins) if margin < NEAR_TIE]
    # The other token may begin with the whole text of this one: then the next one's text is the first that differs.
    ties = [(index, index + 2) for index in near]
    lengths = [[len(tokenizer.detokenize(tokens[:count])) for count in tie] for tie in ties]
    return ReferenceText(result["text"], [(start, end) for start, end in lengths])


def _margin(chosen: float, logprobs: Sequence[float]) -> float:
    """Return the chosen token's logprob minus the next lower logprob.

    Tokens that are more likely than the chosen token are ignored, because the constraint did not allow these tokens.
    """
    allowed = sorted((logprob for logprob in logprobs if logprob <= chosen), reverse=True)  # the choice is the first
    return chosen - allowed[1] if len(allowed) > 1 else math.inf
