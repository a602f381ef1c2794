"""Which tokens may come next by a JSON Schema, a regular expression or a Lark grammar. llguidance does the work.

Its methods never raise: a matcher that meets an error keeps it, and from then on allows an end only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from cellama.config import limits
from cellama.engine.errors import GrammarFailed, InvalidRequest

Ids = NDArray[np.int64]
_SPECIAL = b"\xff"  # how llguidance marks the texts of control tokens; no UTF-8 has it
_SILENT = 0  # llguidance's level for stderr
LIMITS = LLParserLimits(
    max_items_in_row=limits.GRAMMAR_ROW_ITEMS,
    initial_lexer_fuel=limits.GRAMMAR_COMPILE_FUEL,
    step_lexer_fuel=limits.GRAMMAR_STEP_FUEL,
    step_max_items=limits.GRAMMAR_STEP_ITEMS,
    max_lexer_states=limits.GRAMMAR_LEXER_STATES,
    max_grammar_size=limits.GRAMMAR_SIZE,
    verbose_errors=False,
)


class MatcherTokens:
    """A vocabulary in llguidance's form. Takes 0.3 s and some MB for 150,000 tokens. Any thread."""

    def __init__(
        self,
        pieces: Iterable[bytes],
        controls: Mapping[int, bytes],
        ends: frozenset[int],
        spell: Callable[[bytes], list[int]],
    ) -> None:
        """`pieces` are the bytes of all tokens; `controls` the names of those that have none, for Lark's `<name>`.

        `ends` are the tokens that end a generation, `spell` gives the tokens of a text in the middle of another one.
        """
        texts = [piece if _is_text(piece) else b"" for piece in pieces]
        for token in controls.keys() | ends:
            texts[token] = _SPECIAL + controls.get(token, texts[token])
        self.ends = ends
        if not ends:  # llguidance needs one: it is beyond the vocabulary then
            texts.append(_SPECIAL)
        known_ends = sorted(ends) or [len(texts) - 1]
        self._tokenizer = LLTokenizer(_Vocabulary(texts, known_ends[0], spell), eos_token=known_ends)

    def compile(self, grammar: str, what: str) -> LLMatcher:
        """A matcher at its beginning, for `Matcher` to copy. Releases the GIL.

        `grammar` is Lark, or what `LLMatcher.grammar_from_…` returns. Raises InvalidRequest, which calls it `what`.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=_SILENT, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(f"{what} can't be compiled: {reason_of(matcher.get_error())}")
        return matcher


class Matcher:
    """The grammar of one sequence. The Constraint of `sampler.py`. Engine thread only."""

    def __init__(self, compiled: LLMatcher, tokens: MatcherTokens) -> None:
        self._matcher = compiled.deep_copy()
        self._ends = tokens.ends
        self._mask: NDArray[np.uint8] | None = None  # a bit per token, of this place

    def allows(self, tokens: Ids) -> NDArray[np.bool_]:
        """Which of these tokens may come next. Raises GrammarFailed when that takes too much work.

        A text that there is no choice about can be spelled by several tokens. One that is asked for alone may be any of
        them; of many only the usual one is allowed.
        """
        if len(tokens) == 1 and self._mask is None:
            return np.array([self._allows_one(int(tokens[0]))], np.bool_)
        if self._mask is None:
            mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self._check()  # after an error it has the ends
            self._mask = mask
        bits: NDArray[np.uint8] = (self._mask[tokens >> 3] >> (tokens & 7)) & 1
        return bits.astype(np.bool_)

    def _allows_one(self, token: int) -> bool:
        """As a mask has it, without one: most tokens that a model likes are allowed."""
        allowed = self._matcher.is_accepting() if token in self._ends else self._matcher.validate_tokens([token]) == 1
        self._check()
        return allowed

    def accept(self, token: int) -> None:
        """An allowed token comes next. Raises GrammarFailed."""
        self._mask = None
        if token not in self._ends:
            self._matcher.consume_token(token)
            self._check()

    def forced_tokens(self) -> list[int]:
        """The tokens that come next whatever the model wants, as the vocabulary spells them."""
        return self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailed(
                f"the text can't be continued by its grammar or schema: {reason_of(self._matcher.get_error())}"
            )


def reason_of(error: str) -> str:
    """The first line of llguidance's message, which is followed by what only its developers read."""
    return error.strip().partition("\n")[0] or "no reason given"


def _is_text(piece: bytes) -> bool:
    """False for tokens that no text has: a NUL at the beginning stands for none."""
    return piece[:1] not in (b"", b"\0", _SPECIAL)


class _Vocabulary(TokenizerWrapper):
    """What LLTokenizer reads of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    special_token_ids = ()  # `tokens` are marked already

    def __init__(self, tokens: Sequence[bytes], end: int, spell: Callable[[bytes], list[int]]) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self._spell = spell

    def __call__(self, text: str | bytes) -> list[int]:
        return self._spell(text if isinstance(text, bytes) else text.encode())
