"""GBNF grammars allow what they describe, invalid ones are rejected, and none exceeds its limit of work."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cellama.config import limits
from cellama.engine.errors import GrammarFailed, InvalidRequest
from cellama.engine.grammar import automaton as grammar_module
from cellama.engine.grammar.automaton import Automaton, WorkBudget
from cellama.engine.grammar.program import compile_grammar, utf8_sequences
from cellama.engine.grammar.token_grammar import TokenBytes, TokenGrammar

END, CONTROL = 0, 1
PIECES = [b"", b"", b"a", b"aa", b"ab", b"b", b'"', b"\xc3", b"\xa9", "é".encode(), b"\0", b"1", b"aaaaaaaaaaaaaaaa"]
TOKENS = TokenBytes(PIECES, frozenset({END}))
EVERY = np.arange(len(PIECES))


def automaton_of(text: str, root: str = "root") -> Automaton:
    return Automaton(compile_grammar(text, root))


def accepts(automaton: Automaton, text: str) -> bool:
    work = WorkBudget()
    state = automaton.walk(automaton.start(work), text.encode(), work)
    return state >= 0 and automaton.accepting[state]


def allowed_after(text: str, tokens: Sequence[int], visible: dict[int, bytes] | None = None) -> set[int]:
    grammar = TokenGrammar(automaton_of(text), TOKENS, WorkBudget(), visible)
    for token in tokens:
        assert grammar.allows(np.array([token]))[0]
        grammar.accept(token)
    allowed = grammar.allows(EVERY)
    assert [bool(grammar.allows(np.array([token]))[0]) for token in EVERY] == allowed.tolist()
    return set(np.flatnonzero(allowed).tolist())


CHARS = st.sampled_from(["a", "b", "é", "[ab]", "[^a]", "."])


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> tuple[str, str]:
    """Draw the same expression as GBNF and as a regular expression of Python."""
    kind = draw(st.integers(0, 5)) if depth else 0
    if kind <= 1:
        char = draw(CHARS)
        return (char if char[0] in "[." else f'"{char}"'), char
    inner, pattern = draw(expressions(depth - 1))
    if kind == 2:
        min_count = draw(st.integers(0, 2))
        suffix = draw(
            st.sampled_from(
                ["*", "+", "?", f"{{{min_count}}}", f"{{{min_count},}}", f"{{{min_count},{min_count + 2}}}"]
            )
        )
        return f"({inner}){suffix}", f"(?:{pattern}){suffix}"
    other, other_pattern = draw(expressions(depth - 1))
    if kind == 3:
        return f"({inner} | {other})", f"(?:{pattern}|{other_pattern})"
    return f"({inner} {other})", f"(?:{pattern}{other_pattern})"


@given(expressions(), st.lists(st.text("abéc", max_size=6), min_size=1, max_size=10))
def test_grammar_accepts_the_same_strings_as_a_regular_expression(both: tuple[str, str], texts: list[str]) -> None:
    gbnf, pattern = both
    automaton = automaton_of(f"root ::= {gbnf}")
    for text in texts:
        assert accepts(automaton, text) == bool(re.fullmatch(pattern, text, re.DOTALL)), (gbnf, text)


@given(
    st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF), st.lists(st.characters(exclude_categories=["Cs"]), max_size=5)
)
def test_byte_ranges_match_the_characters_of_a_range(one: int, other: int, chars: list[str]) -> None:
    low, high = min(one, other), max(one, other)
    sequences = list(utf8_sequences(low, high))
    for char in [*chars, *(chr(code) for code in (low, high) if not 0xD800 <= code <= 0xDFFF)]:
        data = char.encode()
        matching = [
            s for s in sequences if len(s) == len(data) and all(a <= b <= c for (a, c), b in zip(s, data, strict=True))
        ]
        assert len(matching) == (low <= ord(char) <= high)


def test_grammar_supports_deep_recursion() -> None:
    automaton = automaton_of('root ::= "(" root ")" | "x" # a comment\n')
    assert accepts(automaton, "(" * 500 + "x" + ")" * 500)
    assert not accepts(automaton, "((x)")
    right = automaton_of('root ::= item | item "," root \n item ::= [a-z]+')
    assert accepts(right, "a,b," * 2000 + "c")
    assert len(right.states) < 10


def test_grammar_starts_at_its_root_and_uses_the_last_rule_with_the_same_name() -> None:
    text = 'root ::= "a"\nother ::= root "b"\nroot ::=\n  "c" | # either\n  "d"\n'
    assert accepts(automaton_of(text, "other"), "db")
    assert not accepts(automaton_of(text, "other"), "ab")


def test_large_repetitions_are_counted_instead_of_expanded() -> None:
    program = compile_grammar('root ::= "a"{3,1000000} "b"', "root")
    assert len(program.nodes) < 10
    automaton = Automaton(program)
    assert accepts(automaton, "a" * 3000 + "b")
    assert not accepts(automaton, "aab")
    exact = automaton_of('root ::= ("a" | "aa"){40}')
    assert [accepts(exact, "a" * count) for count in (39, 40, 80, 81)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("root ::= [a-", "unterminated string or character class in line 1, at the end"),
        ("root ::= missing", "rule 'missing' is not defined"),
        ('other ::= "x"', "rule 'root' is not defined"),
        ('root ::= root "x" | "y"', "rule 'root' starts with itself"),
        ('root ::= a* root | "x"\na ::= "b"?', "rule 'root' starts with itself"),
        ('root ::= a\na ::= b | "x"\nb ::= a', "starts with itself"),
        ("this is not a grammar", "expected '::=' in line 1"),
        ("", "no rules found"),
        ("root ::= <[5]>", "token ids are not supported"),
        ('root ::= "a"{3,2}', "n is less than m"),
        ('root ::= "a"{0,9999999}', f"more than {limits.MAX_GRAMMAR_REPEATS} repetitions"),
        ('root ::= "a"{1' + "0" * 5000 + "}", f"more than {limits.MAX_GRAMMAR_REPEATS} repetitions"),
        ('root ::= "a"?{0,100000}', "a possibly empty part is repeated 100000 times (limit 64)"),
        ('root ::= "a"' + "*" * 10, "one part has more than 3 repetition operators"),
        ("root ::= " + "(" * 10_000, f"parentheses are nested more than {limits.MAX_GRAMMAR_DEPTH} levels deep"),
        ('root ::= "\\q"', "unknown escape"),
        ("root ::= [z-a]", "is reversed"),
        ("root ::= []", "the character class is empty"),
        ('root ::= "\\uD800"', "0xd800 is not a character"),
    ],
)
def test_invalid_grammar_is_rejected_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=r"the grammar can't be used: .*" + re.escape(message)):
        compile_grammar(text, "root")


def test_left_recursion_is_detected_in_linear_time() -> None:
    rules = [f'r{n} ::= r{n + 1} "x" | r{n + 1} "y"' for n in range(1500)]
    compile_grammar("\n".join([*rules, 'r1500 ::= "z"']), "r0")
    with pytest.raises(GrammarFailed, match="too ambiguous"):  # 2^1500 ways to begin
        automaton_of("\n".join([*rules, 'r1500 ::= "z"']), "r0").start(WorkBudget())
    with pytest.raises(InvalidRequest, match="starts with itself"):
        compile_grammar("\n".join([*rules, 'r1500 ::= r0 | "z"']), "r0")


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a" root "x" | "a" root "y" | "a"',
        'root ::= "a" root "a" | "aa" root "b" | "a"',
        'root ::= ("a" | "aa" | "aaa" | "aaaa" | [a-z]){0,100000} "b"',
    ],
)
def test_ambiguous_grammar_fails_instead_of_hanging(text: str) -> None:
    grammar = TokenGrammar(automaton_of(text), TOKENS, WorkBudget())

    def generate() -> None:
        for _ in range(3000):
            assert grammar.allows(EVERY)[2]
            grammar.accept(2)

    with pytest.raises(GrammarFailed, match=r"too ambiguous: more than \d+ parse (steps|stacks) .* rewrite it so that"):
        generate()


def test_known_states_require_no_work() -> None:
    automaton = automaton_of('root ::= ([a-z] [a-z0-9]* " "?)+')
    first, second = WorkBudget(), WorkBudget()
    for work in (first, second):
        grammar = TokenGrammar(automaton, TOKENS, work)
        for _ in range(5):
            grammar.allows(EVERY)
            grammar.accept(4)
    assert first.remaining > 0.9 * limits.GRAMMAR_WORK
    assert second.remaining == limits.GRAMMAR_WORK


def test_choosing_between_thousands_of_strings_takes_little_work() -> None:
    words = [f"{number * 7919 % 10_000:04}" for number in range(5000)]
    automaton, work = automaton_of("root ::= " + " | ".join(f'"{word}"' for word in words)), WorkBudget()
    for word in words[::50]:
        state = automaton.walk(automaton.start(work), word.encode(), work)
        assert automaton.accepting[state]
        assert automaton.walk(automaton.start(work), word.encode() + b"0", work) < 0
    assert work.remaining > limits.GRAMMAR_WORK / 2


def test_characters_may_be_split_between_tokens() -> None:
    assert allowed_after("root ::= [é]", []) == {7, 9}
    assert allowed_after("root ::= [é]", [7]) == {8}
    assert allowed_after("root ::= [é]", [7, 8]) == {END}


def test_control_tokens_are_allowed_only_if_their_text_is_visible() -> None:
    text = 'root ::= "ab" | "a" "b" "1"'
    assert CONTROL not in allowed_after(text, [])
    assert CONTROL in allowed_after(text, [], {CONTROL: b"ab"})
    assert allowed_after(text, [CONTROL], {CONTROL: b"ab"}) == {END, 11}
    assert 10 not in allowed_after("root ::= [^a]", [])  # the token starts with a NUL


def test_automaton_rebuilds_dropped_states(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'root ::= "(" root ")" | [a-c]{2,9} | "a" root'
    walk = [2, 2, 5, 2]
    expected = [allowed_after(text, walk[:count]) for count in range(len(walk) + 1)]
    monkeypatch.setattr(grammar_module, "_MAX_STATES", 0)
    assert [allowed_after(text, walk[:count]) for count in range(len(walk) + 1)] == expected
    automaton = automaton_of(text)
    one, other = TokenGrammar(automaton, TOKENS, WorkBudget()), TokenGrammar(automaton, TOKENS, WorkBudget())
    for token in walk:
        one.accept(token)
    assert set(np.flatnonzero(one.allows(EVERY))) == expected[-1]
    assert set(np.flatnonzero(other.allows(EVERY))) == expected[0]


def test_request_fails_when_its_text_violates_the_grammar() -> None:
    grammar = TokenGrammar(automaton_of('root ::= "b"'), TOKENS, WorkBudget())
    with pytest.raises(GrammarFailed, match="token 2 does not follow the grammar"):
        grammar.accept(2)


def test_automaton_drops_its_states_when_frames_need_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_MAX_BYTES", 100_000)
    automaton = automaton_of('root ::= "b" root "a" | "a"')  # each b adds a frame
    grammar = TokenGrammar(automaton, TOKENS, WorkBudget())
    generation, max_bytes = automaton.generation, 0
    for _ in range(2000):
        assert grammar.allows(np.array([5])).all()
        grammar.accept(5)
        max_bytes = max(max_bytes, automaton.num_bytes)
    assert automaton.generation is not generation
    assert max_bytes < 110_000
