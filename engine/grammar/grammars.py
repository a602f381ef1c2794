"""Compile requests' constraints, using llguidance or, for GBNF grammars, an automaton."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from cellama.config import limits

from .automaton import Automaton, WorkBudget
from .matcher import Matcher, MatcherTokens, SharedGrammar
from .program import compile_grammar
from .schema import prepare_schema
from .token_grammar import TokenBytes, TokenGrammar

_MAX_AUTOMATA_BYTES = 32 << 20  # maximum size of all cached automata in bytes; the most recently used one always stays


class Constraint(Protocol):
    """Determines which tokens may come next in one sequence."""

    def allows(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether each of these tokens may come next. Raises GrammarFailed if the check takes too much work."""
        ...

    def mask(self) -> NDArray[np.bool_] | None:
        """Return whether each token of the vocabulary may come next, or None if this check would take too long."""
        ...

    def accept(self, token: int) -> None:
        """Advance past an allowed token. Raises GrammarFailed if the token is not allowed."""
        ...

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next, or an empty list if the constraint leaves a choice."""
        ...


class GrammarSpec(NamedTuple):
    """The constraint that a request sets on its generated text.

    `kind` is json_schema, regex, lark or grammar (GBNF).
    """

    kind: str
    text: str
    root: str = "root"  # GBNF only: the name of the start rule
    strict: bool = True  # JSON Schema only: reject keywords that can't be enforced instead of ignoring them


class CompiledGrammar(NamedTuple):
    """A request's compiled constraint.

    `start` returns a new constraint for one of the request's sequences, and may raise GrammarFailed.
    """

    start: Callable[[], Constraint]
    warnings: tuple[str, ...] = ()  # parts of the request that are not enforced


class _CachedGrammar(NamedTuple):
    grammar: SharedGrammar | Automaton
    warnings: tuple[str, ...]


class Grammars:
    """Compiles constraints for one vocabulary, and caches the recently used constraints. This class is thread-safe."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        controls: Mapping[int, bytes],
        ends: frozenset[int],
        tokenize: Callable[[bytes], list[int]],
    ) -> None:
        """Create a compiler. The arguments are the same as for MatcherTokens."""
        self._pieces = pieces
        self._controls = controls
        self._ends = ends
        self._tokenize = tokenize
        self._cache: OrderedDict[GrammarSpec, _CachedGrammar] = OrderedDict()
        self._lock = threading.Lock()

    @functools.cached_property
    def tokens(self) -> TokenBytes:
        """The bytes of all text tokens."""
        return TokenBytes(self._pieces, self._ends)

    @functools.cached_property
    def _matcher_tokens(self) -> MatcherTokens:
        return MatcherTokens(self._pieces, self._controls, self._ends, self._tokenize)

    def compile(self, spec: GrammarSpec, visible: Mapping[int, bytes] | None = None) -> CompiledGrammar:
        """Compile a constraint.

        Raises InvalidRequest if the constraint can't be compiled. llguidance releases the GIL during compilation.
        `visible` maps control tokens to their texts, which are part of the output. A GBNF grammar matches the texts of
        these tokens, and a Lark grammar refers to the tokens by name.
        """
        grammar, warnings = self._compiled(spec)
        if isinstance(grammar, Automaton):
            work = WorkBudget()
            return CompiledGrammar(lambda: TokenGrammar(grammar, self.tokens, work, visible))
        return CompiledGrammar(lambda: Matcher(grammar), warnings)

    def _compiled(self, spec: GrammarSpec) -> _CachedGrammar:
        with self._lock:
            found = self._cache.get(spec)
        new = found or self._make(spec)
        with self._lock:
            cached = self._cache.setdefault(spec, new)
            self._cache.move_to_end(spec)
            if len(self._cache) > limits.MAX_COMPILED_GRAMMARS:
                self._cache.popitem(last=False)
            self._evict_automata()
        return cached

    def _evict_automata(self) -> None:
        """Drop the least recently used automata if all automata together use too much memory.

        Automata grow with use.
        """
        automata = {spec: each.grammar for spec, each in self._cache.items() if isinstance(each.grammar, Automaton)}
        num_bytes = sum(automaton.num_bytes for automaton in automata.values())
        for spec, automaton in list(automata.items())[:-1]:
            if num_bytes <= _MAX_AUTOMATA_BYTES:
                break
            num_bytes -= automaton.num_bytes
            del self._cache[spec]

    def _make(self, spec: GrammarSpec) -> _CachedGrammar:
        if spec.kind == "json_schema":
            return self._from_schema(spec)
        if spec.kind == "grammar":
            return _CachedGrammar(Automaton(compile_grammar(spec.text, spec.root)), ())
        if spec.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(spec.text)
        else:
            grammar = LLMatcher.grammar_from_lark(spec.text)
        return _CachedGrammar(SharedGrammar(self._matcher_tokens, grammar, spec.kind), ())

    def _from_schema(self, spec: GrammarSpec) -> _CachedGrammar:
        """Prepare a schema and compile it. Only compilation shows whether llguidance accepts a schema."""
        attempts: list[tuple[str, LLMatcher]] = []

        def try_compile(grammar: str) -> str:
            attempts.append((grammar, self._matcher_tokens.attempt(grammar)))
            return attempts[-1][1].get_error()

        warnings = prepare_schema(spec.text, strict=spec.strict, try_compile=try_compile).warnings
        grammar, first = attempts[-1]
        return _CachedGrammar(SharedGrammar(self._matcher_tokens, grammar, spec.kind, first), warnings)
