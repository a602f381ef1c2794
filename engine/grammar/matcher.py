"""Use llguidance to check which tokens a JSON Schema, a regular expression or a Lark grammar allows.

llguidance's methods never raise exceptions. After an error, a matcher stores the error and allows only an end token.
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
_SPECIAL = b"\xff"  # llguidance's prefix for texts of control tokens: a byte that never occurs in UTF-8
T = TypeVar("T")
# Maximum lengths of texts. Where all texts up to one of these lengths are allowed, llguidance does not check their
# tokens one by one. The slowest masks occur shortly before a maxLength. Their 99.9th percentile is 3.2 ms with
# llguidance's default lengths (10 and 30), and 1.8 ms with these. Each length needs 8 MB for 150,000 tokens.
_LENGTHS = (2, 4, 6, 7, 8, 9, 10, 11, 12, 14, 30)
_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{length}}}" for length in _LENGTHS), f"{_TEXT}+"]
_MASK_EVERY = 16  # tokens between two masks, each of which resets llguidance's count of lexer work
_MAX_RESTARTS = 4  # restarts per sequence, each of which compiles the grammar and accepts the text again
_SILENT = 0  # llguidance's log level for stderr
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
    """A vocabulary in llguidance's format. This class is thread-safe.

    Creating an object for 150,000 tokens takes 0.7 s and 100 MB.
    """

    def __init__(
        self,
        pieces: Iterable[bytes],
        controls: Mapping[int, bytes],
        ends: frozenset[int],
        tokenize: Callable[[bytes], list[int]],
    ) -> None:
        """Convert a vocabulary: the bytes of all tokens (`pieces`) and the Lark names of control tokens (`controls`).

        `ends` are the tokens that end generation. `tokenize` returns the tokens that a string has inside a longer text.
        """
        texts = [piece if _is_text(piece) else b"" for piece in pieces]
        for token in controls.keys() | ends:
            texts[token] = _SPECIAL + controls.get(token, texts[token])
        self.ends = ends
        self.num_tokens = len(texts)
        if not ends:  # llguidance needs an end token, so add one after the vocabulary
            texts.append(_SPECIAL)
        end_ids = sorted(ends) or [len(texts) - 1]
        vocabulary = _Vocabulary(texts, end_ids[0], tokenize)
        self._tokenizer = LLTokenizer(vocabulary, eos_token=end_ids, slices=_SLICES)

    def attempt(self, grammar: str) -> LLMatcher:
        """Return a new matcher. If the grammar can't be compiled, the matcher contains an error.

        This method releases the GIL. `grammar` is a Lark grammar or a result of `LLMatcher.grammar_from_…`.
        """
        return LLMatcher(self._tokenizer, grammar, log_level=_SILENT, limits=LIMITS)

    def compile(self, grammar: str, name: str) -> LLMatcher:
        """Return a new matcher like `attempt`.

        Raises InvalidRequest, with `name` in the message, if the grammar can't be compiled.
        """
        matcher = self.attempt(grammar)
        if matcher.is_error():
            raise InvalidRequest(f"{name} can't be compiled: {reason_of(matcher.get_error())}")
        return matcher


class SharedGrammar:
    """A compiled grammar, which is copied for each sequence. This class is thread-safe.

    All copies share a lexer, which caches both its states and any error. After one sequence's text has required too
    much work, every copy would fail. The grammar is therefore recompiled once for all of its matchers.
    """

    def __init__(self, tokens: MatcherTokens, grammar: str, name: str, first: LLMatcher | None = None) -> None:
        """Compile the grammar with `MatcherTokens.compile`, unless `first` is a new matcher for this grammar."""
        self.tokens = tokens
        self._grammar = grammar
        self._name = name
        self._first, self._number = first or tokens.compile(grammar, name), 0
        self._lock = threading.Lock()

    def copy(self) -> tuple[LLMatcher, int]:
        """Return a new matcher, and the number of the lexer that the matcher uses."""
        with self._lock:
            return self._first.deep_copy(), self._number

    def renew(self, number: int) -> bool:
        """Return True if the lexer with this number has failed. If so, later copies use a new lexer."""
        probe, current = self.copy()
        if current != number:
            return True
        probe.compute_bitmask()
        if not probe.is_error():
            return False
        renewed = self.tokens.compile(self._grammar, self._name)
        with self._lock:
            self._first, self._number = renewed, number + 1
        return True


class Matcher:
    """A Constraint (grammars.py) that applies an llguidance grammar to one sequence.

    Only the engine thread may use this class.
    """

    def __init__(self, shared: SharedGrammar) -> None:
        self._shared = shared
        self._matcher, self._lexer = shared.copy()
        self._ends = shared.tokens.ends
        self._num_tokens = shared.tokens.num_tokens
        self._mask: NDArray[np.bool_] | None = None  # mask at the current position
        self._accepted: list[int] = []
        self._num_restarts = 0

    def allows(self, tokens: Ids) -> NDArray[np.bool_]:
        """Return whether each of these tokens may come next. Raises GrammarFailed if this check takes too much work.

        Even if the grammar allows only one text, different tokens may spell this text. A single token is checked
        against all tokenizations, but several tokens are checked only against the usual tokenization.
        """
        if len(tokens) == 1 and self._mask is None and self._allows_one(int(tokens[0])):
            return np.ones(1, np.bool_)
        return self.mask()[tokens]

    def mask(self) -> NDArray[np.bool_]:
        """Return whether each token may come next. Raises GrammarFailed if this check takes too much work."""
        if self._mask is None:
            bits = np.frombuffer(self._retry(LLMatcher.compute_bitmask), np.uint8)
            self._mask = np.unpackbits(bits, count=self._num_tokens, bitorder="little").view(np.bool_)
        return self._mask

    def _allows_one(self, token: int) -> bool:
        """Return True if the token is certainly allowed.

        If the result is False, the token may still be allowed, so check the mask.
        """
        if token in self._ends:
            return self._retry(LLMatcher.is_accepting)
        return self._matcher.validate_tokens([token]) == 1

    def accept(self, token: int) -> None:
        """Advance past an allowed token. Raises GrammarFailed if the grammar can't continue after this token."""
        self._mask = None
        if token not in self._ends:
            self._retry(lambda matcher: matcher.consume_token(token))
            self._accepted.append(token)
            if len(self._accepted) % _MASK_EVERY == 0:
                self._matcher.compute_bitmask()

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, in the vocabulary's usual tokenization."""
        return self._matcher.compute_ff_tokens()

    def _retry(self, call: Callable[[LLMatcher], T]) -> T:
        """Call a function with the matcher, and return the function's result.

        If the shared lexer failed, restart the matcher and repeat the call.
        """
        answer = call(self._matcher)
        if self._matcher.is_error():
            self._restart()
            answer = call(self._matcher)
            self._check()
        return answer

    def _restart(self) -> None:
        """Restore the current position with a new lexer.

        Raises GrammarFailed if this sequence's text caused the error.
        """
        if self._num_restarts == _MAX_RESTARTS or not self._shared.renew(self._lexer):
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
                f"matching the text against the grammar or schema failed: {reason_of(self._matcher.get_error())}"
            )


def reason_of(error: str) -> str:
    """Return the first line of llguidance's message. The other lines are meant for llguidance's developers."""
    return error.strip().partition("\n")[0] or "no reason given"


def _is_text(piece: bytes) -> bool:
    """Return whether a token represents text. Tokens that start with a NUL byte don't represent text."""
    return piece[:1] not in (b"", b"\0", _SPECIAL)


class _Vocabulary(TokenizerWrapper):
    """A tokenizer that has only the attributes and methods that LLTokenizer uses."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    special_token_ids = ()  # `tokens` already have the prefix

    def __init__(self, tokens: Sequence[bytes], end: int, tokenize: Callable[[bytes], list[int]]) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self._tokenize = tokenize

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenize(text if isinstance(text, bytes) else text.encode())
