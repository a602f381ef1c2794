"""Compiles what requests ask for: JSON Schema, regular expressions and Lark for llguidance, GBNF for our automaton."""

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

from .automaton import WorkBudget
from .matcher import Matcher, MatcherTokens, SharedGrammar
from .schema import prepare_schema
from .token_grammar import Automata, TokenBytes, TokenGrammar


class Constraint(Protocol):
    """What the text of one sequence may be; sampling/sampler.py says what its methods do."""

    def allows(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]: ...

    def mask(self) -> NDArray[np.bool_] | None: ...

    def accept(self, token: int) -> None: ...

    def forced_tokens(self) -> list[int]: ...


class Form(NamedTuple):
    """What a request says of its text. `kind` is one of json_schema, regex, lark and grammar (GBNF)."""

    kind: str
    text: str
    root: str = "root"  # GBNF: the rule that it begins with
    strict: bool = True  # JSON Schema: what can't be enforced is refused, not ignored


class Compiled(NamedTuple):
    """A request's constraint: `begin` gives one to each of its sequences, and may raise GrammarFailed."""

    begin: Callable[[], Constraint]
    warnings: tuple[str, ...] = ()  # what the request asks for and is not enforced


class _Kept(NamedTuple):
    grammar: SharedGrammar
    warnings: tuple[str, ...]


class Grammars:
    """Compiles over one vocabulary, and keeps what was used last. Any thread."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        controls: Mapping[int, bytes],
        ends: frozenset[int],
        spell: Callable[[bytes], list[int]],
    ) -> None:
        """As MatcherTokens."""
        self._pieces = pieces
        self._controls = controls
        self._ends = ends
        self._spell = spell
        self._kept: OrderedDict[Form, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    @functools.cached_property
    def tokens(self) -> TokenBytes:
        """The bytes of all tokens, without those that are no text."""
        return TokenBytes(self._pieces, self._ends)

    @functools.cached_property
    def _automata(self) -> Automata:
        return Automata(self.tokens)

    @functools.cached_property
    def _matcher_tokens(self) -> MatcherTokens:
        return MatcherTokens(self._pieces, self._controls, self._ends, self._spell)

    def compile(self, form: Form, visible: Mapping[int, bytes] | None = None) -> Compiled:
        """Releases the GIL while llguidance works. Raises InvalidRequest.

        `visible` are control tokens whose text belongs to the output: GBNF matches them by it. Lark names them.
        """
        if form.kind == "grammar":
            automaton, work = self._automata.get(form.text, form.root), WorkBudget()
            return Compiled(lambda: TokenGrammar(automaton, self.tokens, work, visible))
        kept = self._compiled(form)
        return Compiled(lambda: Matcher(kept.grammar), kept.warnings)

    def _compiled(self, form: Form) -> _Kept:
        with self._lock:
            found = self._kept.get(form)
        made = found or self._make(form)
        with self._lock:
            kept = self._kept.setdefault(form, made)
            self._kept.move_to_end(form)
            if len(self._kept) > limits.MAX_COMPILED_GRAMMARS:
                self._kept.popitem(last=False)
        return kept

    def _make(self, form: Form) -> _Kept:
        if form.kind == "json_schema":
            return self._from_schema(form)
        if form.kind == "regex":
            grammar = LLMatcher.grammar_from_regex(form.text)
        else:
            grammar = LLMatcher.grammar_from_lark(form.text)
        return _Kept(SharedGrammar(self._matcher_tokens, grammar, form.kind), ())

    def _from_schema(self, form: Form) -> _Kept:
        """A schema is compiled while it is prepared: that shows whether it can be."""
        tried: list[tuple[str, LLMatcher]] = []

        def compiled(grammar: str) -> str:
            tried.append((grammar, self._matcher_tokens.attempt(grammar)))
            return tried[-1][1].get_error()

        warnings = prepare_schema(form.text, strict=form.strict, compiled=compiled).warnings
        grammar, first = tried[-1]
        return _Kept(SharedGrammar(self._matcher_tokens, grammar, form.kind, first), warnings)
