"""Which tokens may come next by a JSON Schema, a regular expression or a Lark grammar. llguidance does the work.

Its methods never raise: a matcher that meets an error keeps it, and from then on allows an end only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from cellama.config import limits
from cellama.engine.errors import GrammarFailed, InvalidRequest

Ids = NDArray[np.int64]
_SPECIAL = b"\xff"  # how llguidance marks the texts of control tokens; no UTF-8 has it
T = TypeVar("T")
# Texts by length: where all of one length are allowed, their tokens need not be looked at one by one. The longest masks
# come shortly before a maxLength: the 99.9th percentile is 3.2 ms with the default lengths, 10 and 30, and 1.8 ms with
# these. Each length takes 8 MB for 150,000 tokens.
_LENGTHS = (2, 4, 6, 7, 8, 9, 10, 11, 12, 14, 30)
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{most}}}" for most in _LENGTHS), f"{_TEXT}+"]
_MASK_EVERY = 16  # tokens: llguidance counts the work on a lexer from one mask to the next
_MOST_RESTARTS = 4  # of a sequence: each takes as long as compiling the grammar and accepting the text
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
    """A vocabulary in llguidance's form. Takes 0.7 s and 100 MB for 150,000 tokens. Any thread."""

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
        self.num_tokens = len(texts)
        if not ends:  # llguidance needs one: it is beyond the vocabulary then
            texts.append(_SPECIAL)
        known_ends = sorted(ends) or [len(texts) - 1]
        vocabulary = _Vocabulary(texts, known_ends[0], spell)
        self._tokenizer = LLTokenizer(vocabulary, eos_token=known_ends, slices=_SLICES)

    def attempt(self, grammar: str) -> LLMatcher:
        """A matcher at its beginning, or with an error if the grammar can't be compiled. Releases the GIL.

        `grammar` is Lark, or what `LLMatcher.grammar_from_…` returns.
        """
        return LLMatcher(self._tokenizer, grammar, log_level=_SILENT, limits=LIMITS)

    def compile(self, grammar: str, what: str) -> LLMatcher:
        """As `attempt`. Raises InvalidRequest, which calls the grammar `what`."""
        matcher = self.attempt(grammar)
        if matcher.is_error():
            raise InvalidRequest(f"{what} can't be compiled: {reason_of(matcher.get_error())}")
        return matcher


class SharedGrammar:
    """A compiled grammar at its beginning, for matchers to copy. Any thread.

    All copies share a lexer, which keeps the states that it has built. It keeps an error as well: after one text that
    needed too much work every copy would fail. Then the grammar is compiled again, once for all of its matchers.
    """

    def __init__(self, tokens: MatcherTokens, grammar: str, what: str, first: LLMatcher | None = None) -> None:
        """As `MatcherTokens.compile`. `first` is a matcher of the grammar at its beginning, if there is one."""
        self.tokens = tokens
        self._grammar = grammar
        self._what = what
        self._first, self._number = first or tokens.compile(grammar, what), 0
        self._lock = threading.Lock()

    def copy(self) -> tuple[LLMatcher, int]:
        """A matcher at its beginning, and the number of its lexer."""
        with self._lock:
            return self._first.deep_copy(), self._number

    def renew(self, number: int) -> bool:
        """True if that lexer has an error, which its copies keep; then copies have another one from now on."""
        probe, current = self.copy()
        if current != number:
            return True
        probe.compute_bitmask()
        if not probe.is_error():
            return False
        fresh = self.tokens.compile(self._grammar, self._what)
        with self._lock:
            self._first, self._number = fresh, number + 1
        return True


class Matcher:
    """The grammar of one sequence. The Constraint of `sampler.py`. Engine thread only."""

    def __init__(self, shared: SharedGrammar) -> None:
        self._shared = shared
        self._matcher, self._lexer = shared.copy()
        self._ends = shared.tokens.ends
        self._num_tokens = shared.tokens.num_tokens
        self._mask: NDArray[np.bool_] | None = None  # of this place
        self._accepted: list[int] = []
        self._num_restarts = 0

    def allows(self, tokens: Ids) -> NDArray[np.bool_]:
        """Which of these tokens may come next. Raises GrammarFailed when that takes too much work.

        A text that there is no choice about can be spelled by several tokens. One that is asked for alone may be any of
        them; of many only the usual one is allowed.
        """
        if len(tokens) == 1 and self._mask is None and self._allows_one(int(tokens[0])):
            return np.ones(1, np.bool_)
        return self.mask()[tokens]

    def mask(self) -> NDArray[np.bool_]:
        """Which of all tokens may come next. Raises GrammarFailed when that takes too much work."""
        if self._mask is None:
            bits = np.frombuffer(self._asked(LLMatcher.compute_bitmask), np.uint8)
            self._mask = np.unpackbits(bits, count=self._num_tokens, bitorder="little").view(np.bool_)
        return self._mask

    def _allows_one(self, token: int) -> bool:
        """True if it is allowed; False also if that isn't known without a mask, which starts a new count of work."""
        if token in self._ends:
            return self._asked(LLMatcher.is_accepting)
        return self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """An allowed token comes next. Raises GrammarFailed."""
        self._mask = None
        if token not in self._ends:
            self._asked(lambda matcher: matcher.consume_token(token))
            self._accepted.append(token)
            if len(self._accepted) % _MASK_EVERY == 0:
                self._matcher.compute_bitmask()

    def forced_tokens(self) -> list[int]:
        """The tokens that come next whatever the model wants, as the vocabulary spells them."""
        return self._matcher.compute_ff_tokens()

    def _asked(self, ask: Callable[[LLMatcher], T]) -> T:
        """What the matcher answers; after an error of the shared lexer another one is asked."""
        answer = ask(self._matcher)
        if self._matcher.is_error():
            self._restart()
            answer = ask(self._matcher)
            self._check()
        return answer

    def _restart(self) -> None:
        """Gets to the same place with a lexer without an error. Raises GrammarFailed if the error is of this text."""
        if self._num_restarts == _MOST_RESTARTS or not self._shared.renew(self._lexer):
            self._check()
        self._num_restarts += 1
        matcher, self._lexer = self._shared.copy()
        for number, token in enumerate(self._accepted):
            if number % _MASK_EVERY == 0:
                matcher.compute_bitmask()
            matcher.consume_token(token)
        self._matcher = matcher
        self._check()

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
