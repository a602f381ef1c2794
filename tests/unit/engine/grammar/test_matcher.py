"""Schemas, regular expressions and Lark constrain a small vocabulary, and errors fail only their own sequence."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from cellama.config import limits
from cellama.engine.errors import GrammarFailed, InvalidRequest
from cellama.engine.grammar import grammars as grammars_module
from cellama.engine.grammar.automaton import Automaton, WorkBudget
from cellama.engine.grammar.grammars import CompiledGrammar, Constraint, Grammars, GrammarSpec
from cellama.engine.grammar.matcher import Matcher, SharedGrammar
from cellama.engine.grammar.token_grammar import TokenGrammar

WORDS = [b'{"', b'": ', b'"a"', b"tru", b"true", b", ", b"12", b"\0", b"\xe2\x82", "€uro".encode()]
PIECES = [bytes([byte]) for byte in range(256)] + WORDS + [b"", b"", b""]
TOOL, STOP, END = len(PIECES) - 3, len(PIECES) - 2, len(PIECES) - 1  # control tokens, of which the last two end a text
ALL = np.arange(len(PIECES))
CONTROLS = {TOOL: b"<tool>", STOP: b"<stop>", END: b"<end>"}


def grammars_of(ends: frozenset[int] = frozenset({STOP, END})) -> Grammars:
    return Grammars(PIECES, CONTROLS, ends, list)


GRAMMARS = grammars_of()


def compiled(kind: str, text: str | dict[str, Any]) -> CompiledGrammar:
    return GRAMMARS.compile(GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text)))


def after(text: bytes | list[int], constraint: Constraint) -> Constraint:
    for token in text:
        assert constraint.allows(np.array([token]))[0]
        constraint.accept(token)
    return constraint


def allowed(constraint: Constraint) -> set[int]:
    return set(np.flatnonzero(constraint.allows(ALL)).tolist())


CONSTRAINTS = {
    "schema": compiled("json_schema", {"enum": [True, "a", 12, None]}),
    "object": compiled("json_schema", {"type": "object", "properties": {"a": {"type": "integer", "maximum": 120}}}),
    "regex": compiled("regex", "(true|[0-9]{1,3}€uro)x?"),
    "lark": compiled("lark", 'start: "a" <tool> "b"*'),
    "recursive lark": compiled("lark", 'start: "a" start "b" | "1"'),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("seed", range(8))
def test_check_of_a_single_token_agrees_with_the_mask_of_all_tokens(name: str, seed: int) -> None:
    """If the text has no alternative, the mask has only its usual spelling, even after `forced_tokens` was called."""
    random = Random(seed)
    constraint, masked, forcing = CONSTRAINTS[name].start(), CONSTRAINTS[name].start(), CONSTRAINTS[name].start()
    for _ in range(40):
        mask = masked.allows(ALL)
        alone = np.array([constraint.allows(ALL[token : token + 1])[0] for token in ALL])
        forced = forcing.forced_tokens()
        assert (forcing.allows(ALL) == mask).all()
        if forced:
            assert np.flatnonzero(mask).tolist() == forced[:1]
            assert alone[forced[0]]
        else:
            assert (alone == mask).all()
        choices = [token for token in np.flatnonzero(alone).tolist() if token not in (STOP, END)]
        if not choices:
            break
        token = random.choice(choices)
        for each in (constraint, masked, forcing):
            each.accept(token)


def test_end_tokens_are_allowed_only_when_the_text_may_end() -> None:
    constraint = compiled("regex", "tru(e!)?").start()
    assert not allowed(constraint) & {STOP, END}
    after(b"tru", constraint)
    assert allowed(constraint) == {STOP, END, ord("e")}
    after(b"e!", constraint)
    assert allowed(constraint) == {STOP, END}
    constraint.accept(END)


def test_tokens_without_text_are_never_allowed() -> None:
    constraint = compiled("regex", r"(?s:.)*").start()
    assert not allowed(constraint) & {TOOL, 0xFF, PIECES.index(b"\0")}
    assert ord("x") in allowed(constraint)


def test_partial_character_is_allowed_but_invalid_utf8_is_not() -> None:
    half = PIECES.index(b"\xe2\x82")
    constraint = compiled("regex", "[€₪x]").start()  # E2 82 AC, E2 82 AA
    assert allowed(constraint) == {ord("x"), 0xE2, half}
    assert allowed(after([half], constraint)) == {0xAC, 0xAA}


def test_lark_grammar_can_refer_to_control_tokens_by_number_or_name() -> None:
    for name in (f"<[{TOOL}]>", "<tool>"):
        constraint = after(b"a", compiled("lark", f'start: "a" {name} "b"').start())
        assert allowed(constraint) == {TOOL}
        after([TOOL, ord("b")], constraint)
        assert allowed(constraint) == {STOP, END}


def test_vocabulary_without_an_end_token_can_be_constrained() -> None:
    constraint = grammars_of(frozenset()).compile(GrammarSpec("regex", "ab")).start()
    assert allowed(after(b"a", constraint)) == {ord("b")}
    assert allowed(after(b"b", constraint)) == set()


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(", "regex can't be compiled"),
        ("regex", "(?=a)", "regex can't be compiled"),
        ("lark", "start: nothing", "lark can't be compiled"),
        ("lark", "", "lark can't be compiled"),
        ("json_schema", "{", "json_schema"),
    ],
)
def test_grammar_that_does_not_compile_is_rejected_with_a_one_line_error(kind: str, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        compiled(kind, text)
    assert "\n" not in str(caught.value)


def test_matcher_keeps_failing_after_a_text_that_violates_the_grammar() -> None:
    constraint = compiled("regex", "ab").start()
    with pytest.raises(GrammarFailed, match="matching the text against the grammar or schema failed"):
        constraint.accept(ord("x"))
    with pytest.raises(GrammarFailed):
        constraint.allows(ALL)
    with pytest.raises(GrammarFailed):
        constraint.allows(ALL[:1])


def test_sequences_of_a_request_do_not_affect_each_other() -> None:
    both = compiled("regex", "ab|cd")
    first, second = both.start(), both.start()
    first.accept(ord("a"))
    second.accept(ord("c"))
    assert allowed(first) == {ord("b")}
    assert allowed(second) == {ord("d")}
    with pytest.raises(GrammarFailed):
        first.accept(ord("x"))
    assert allowed(second) == {ord("d")}
    assert allowed(both.start()) == {ord("a"), ord("c")}


def test_recently_used_grammars_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = grammars_of()
    compiled_specs: list[GrammarSpec] = []
    make = grammars._make
    monkeypatch.setattr(grammars, "_make", lambda form: compiled_specs.append(form) or make(form))
    first = GrammarSpec("regex", "a")
    grammars.compile(first)
    grammars.compile(first)
    assert compiled_specs == [first]
    for number in range(limits.MAX_COMPILED_GRAMMARS):
        kind, text = ("grammar", f'root ::= "{number}"') if number % 2 else ("regex", str(number))
        grammars.compile(GrammarSpec(kind, text))
    grammars.compile(first)
    assert compiled_specs.count(first) == 2


HEAVY = {"type": "string", "pattern": "^(a|b)*a(a|b){8}$", "maxLength": 4000}
LONG = [ord('"'), *Random(1).choices(b"ab", k=3900)]


def test_matcher_accepts_the_long_text_of_a_resumed_job_and_continues() -> None:
    constraint = compiled("json_schema", HEAVY).start()
    for token in LONG:
        constraint.accept(token)
    assert {ord("a"), ord("b")} <= allowed(constraint)


def test_other_texts_with_the_same_grammar_continue_when_the_shared_lexer_has_failed() -> None:
    shared = SharedGrammar(GRAMMARS._matcher_tokens, LLMatcher.grammar_from_json_schema(HEAVY), "json_schema")
    started, waiting = after(LONG[:50], Matcher(shared)), Matcher(shared)
    greedy, lexer = shared.copy()
    assert not greedy.consume_tokens(LONG)  # in one call, so that it needs too much work
    assert {ord("a"), ord("b")} <= allowed(after(LONG[50:60], started))
    assert shared.copy()[1] == lexer + 1
    assert allowed(waiting) >= {ord('"')}
    assert {ord("a"), ord("b")} <= allowed(after(LONG[:60], Matcher(shared)))


def test_automata_are_evicted_when_they_need_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = grammars_of()
    nested, plain, schema = (
        GrammarSpec("grammar", 'root ::= "b" root "a" | "a"'),
        GrammarSpec("grammar", 'root ::= "a"'),
        GrammarSpec("json_schema", '{"type": "null"}'),
    )
    for spec in (schema, nested, plain):
        grammars.compile(spec)
    nested_automaton, plain_automaton = automata_of(grammars)
    monkeypatch.setattr(grammars_module, "_MAX_AUTOMATA_BYTES", nested_automaton.num_bytes + plain_automaton.num_bytes)
    grammars.compile(plain)
    assert automata_of(grammars) == [nested_automaton, plain_automaton]
    grammar = TokenGrammar(nested_automaton, grammars.tokens, WorkBudget())
    for _ in range(200):
        grammar.accept(ord("b"))
    grammars.compile(plain)
    assert automata_of(grammars) == [plain_automaton]
    assert schema in grammars._cache


def automata_of(grammars: Grammars) -> list[Automaton]:
    return [each.grammar for each in grammars._cache.values() if isinstance(each.grammar, Automaton)]
