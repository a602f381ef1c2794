"""What a grammar leaves no choice about, as drafts."""

from __future__ import annotations

import json
from random import Random

import numpy as np
import pytest

from cellama.engine import Request, SamplingParams
from cellama.engine.fake import FakeVocabulary
from cellama.engine.grammar.automaton import Work
from cellama.engine.grammar.json_schema import schema_to_gbnf
from cellama.engine.grammar.token_grammar import Grammar, Grammars
from cellama.engine.llama.samplers import LlamaSampler
from cellama.engine.scheduling.sequence import Sequence
from cellama.engine.speculation.forced import MOST_BYTES, ForcedText, Spelling

END = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 20},
        "address": {"type": "object", "properties": {"größe": {"enum": ["alpha", "beta"]}}, "required": ["größe"]},
        "count": {"type": "integer"},
    },
    "required": ["customer_name", "address", "count"],
}
TEXT = '{"customer_name": "Mia", "address": {"größe": "alpha"}, "count": 12}'.encode()


class Words(FakeVocabulary):
    """Bytes, and control tokens without a text; with `prefixed`, a space comes before every text."""

    def __init__(self, prefixed: bool = False) -> None:
        self._prefixed = prefixed

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return super().tokenize(" " + text if self._prefixed else text)


def grammar_of(text: str) -> Grammar:
    grammars = Grammars([bytes([i]) for i in range(256)] + [b""], frozenset({END}))
    return Grammar(grammars.automaton(text, "root"), grammars.tokens, Work())


def can_follow(grammar: Grammar, token: int) -> bool:
    return bool(grammar.allows(np.array([token]))[0])


def test_likely_text_of_a_schema_has_keys_with_the_usual_blanks() -> None:
    grammar = grammar_of(schema_to_gbnf(json.dumps(SCHEMA)))
    assert grammar.likely_text(0, 96) == (b'{"customer_name": "', 1)
    for byte in b'{"customer_name": "Mia':
        grammar.accept(byte)
    assert grammar.likely_text(ord("a"), 96) == (b"", 0)
    grammar.accept(ord('"'))
    text, num_certain = grammar.likely_text(ord('"'), 96)
    assert (text.decode(), num_certain) == (', "address": {"größe": "', 0)


def test_certain_bytes_are_those_that_the_grammar_allows_alone() -> None:
    grammar = grammar_of(schema_to_gbnf(json.dumps(SCHEMA)))
    before = 0
    for byte in TEXT:
        text, num_certain = grammar.likely_text(before, 96)
        allowed = [other for other in range(257) if can_follow(grammar, other)]
        if num_certain:
            assert allowed == [text[0]] == [byte]
        if text:
            assert text[0] in allowed
        grammar.accept(byte)
        before = byte
    assert grammar.likely_text(before, 96) == (b"", 0)


@pytest.mark.parametrize("seed", range(5))
def test_likely_text_never_breaks_the_grammar(seed: int) -> None:
    random = Random(seed)
    grammar = grammar_of('root ::= "a"{3,9} (" " | "\\n")? ("bcd" | "bce" | "x") root?')
    before = 0
    for _ in range(60):
        text, _ = grammar.likely_text(before, random.choice([1, 5, 96]))
        assert len(text) <= 96
        for byte in text:
            assert can_follow(grammar, byte)
            grammar.accept(byte)
            before = byte
        before = random.choice([other for other in range(256) if can_follow(grammar, other)])
        grammar.accept(before)


@pytest.mark.parametrize("prefixed", [False, True])
def test_spelling_is_that_of_a_text_in_the_middle(prefixed: bool) -> None:
    spelling = Spelling(Words(prefixed))
    assert spelling.tokens_of(b'name": "') == list(b'name": "')
    assert spelling.tokens_of("grö".encode()[:-1]) == list(b"gr")
    assert spelling.tokens_of(b"\xff\xfe") == []


def test_a_forced_text_is_a_draft_whose_last_token_is_less_sure() -> None:
    params = SamplingParams(json_schema=json.dumps(SCHEMA), temperature=0)
    sequence = Sequence(Request("it", (1,), params), 1, 0.0, [1])
    source = ForcedText(sequence, Words(), Spelling(Words()))
    assert source.draft(4) is None  # it has no sampler yet
    sequence.sampler = Bound(grammar_of(schema_to_gbnf(params.json_schema or "")))  # type: ignore[assignment]
    draft = source.draft(30)
    assert draft is not None
    assert bytes(draft.tokens) == b'{"customer_name": "'
    assert draft.marks[0] > draft.marks[1] > draft.marks[-1]
    assert len(source.draft(4).tokens) == 4  # type: ignore[union-attr]


class Bound:
    """The part of a sampler that is asked here."""

    likely_text = LlamaSampler.likely_text

    def __init__(self, grammar: Grammar) -> None:
        self._grammar, self._is_bound = grammar, True


def test_texts_that_are_looked_at_are_bounded() -> None:
    grammar = grammar_of('root ::= "' + "z" * 500 + '"')
    assert grammar.likely_text(0, MOST_BYTES) == (b"z" * MOST_BYTES, MOST_BYTES)


def test_text_that_takes_much_work_to_look_at_is_not_guessed() -> None:
    grammar = grammar_of('root ::= a{200} "z"\na ::= "a"{1,9}')  # "aaa" may be read in very many ways
    assert grammar.likely_text(0, MOST_BYTES) == (b"", 0)
    assert can_follow(grammar, ord("a"))
    assert grammar.likely_text(0, 3) == (b"aaa", 3)
