"""Compile a grammar into a program that matches bytes. The automaton in `automaton.py` walks the program's nodes.

Counted repetitions remain loops, and characters become ranges of UTF-8 bytes, so a program is not much larger than the
grammar's text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cellama.config import limits

from . import gbnf
from .gbnf import GbnfChars, GbnfChoice, GbnfPart, GbnfReference, GbnfRepeat, GbnfSequence, grammar_error

# Ranges of code points whose UTF-8 encodings have the same length. Surrogates have no encoding.
_SAME_LENGTH = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, gbnf.MAX_CODE_POINT))
_MAX_NULLABLE_REPEATS = 64  # maximum repetitions of a nullable part, because no byte separates them
_MAX_CHECKS = 10 * limits.MAX_GRAMMAR_NODES  # maximum number of checks that find the nullable parts
END = 0  # the node that ends a rule


@dataclass(frozen=True, slots=True)
class Edges:
    """A node that accepts one byte. The byte ranges do not overlap, and each range leads to another node."""

    ranges: tuple[tuple[int, int, int], ...]  # lowest byte, highest byte, next node


@dataclass(frozen=True, slots=True)
class Fork:
    """A node after which matching continues with several alternative nodes."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RuleCall:
    """A node that matches the rule at node `start`, and then continues with node `after`."""

    start: int
    after: int


@dataclass(frozen=True, slots=True)
class Loop:
    """A node that repeats the part from node `body` to END, and then continues with node `after`."""

    body: int
    min_count: int
    max_count: int | None
    after: int


Node = Edges | Fork | RuleCall | Loop | None  # None: END


@dataclass(slots=True)
class Program:
    """A list of nodes and the number of the node at which the root rule starts."""

    nodes: list[Node] = field(default_factory=lambda: [None])
    start: int = END


def compile_grammar(text: str, root: str) -> Program:
    """Return the program of a grammar. Raises InvalidRequest if the grammar is invalid, too large or left-recursive."""
    rules = gbnf.parse(text)
    if root not in rules:
        raise grammar_error(f"rule {root!r} is not defined")
    nullable = _NullableParts(rules)
    _reject_left_recursion(rules, nullable)
    return _Compiler(rules, nullable).program(root)


def _references(part: GbnfPart) -> Iterator[str]:
    match part:
        case GbnfReference(name):
            yield name
        case GbnfSequence(parts) | GbnfChoice(parts):
            for inner in parts:
                yield from _references(inner)
        case GbnfRepeat(inner):
            yield from _references(inner)


class _NullableParts:
    """The parts of a grammar that may match the empty string."""

    def __init__(self, rules: dict[str, GbnfPart]) -> None:
        """Find the nullable rules.

        When a rule turns out to be nullable, the rules that refer to it are checked again. Raises InvalidRequest if a
        rule is not defined or the rules are too complex.
        """
        self._rules: set[str] = set()
        self._results: dict[int, bool] = {}  # by id of the part
        users: dict[str, list[str]] = {name: [] for name in rules}
        for name, part in rules.items():
            for inner in set(_references(part)):
                if inner not in rules:
                    raise grammar_error(f"rule {inner!r} is not defined")
                users[inner].append(name)
        self._num_checks = 0
        waiting = list(reversed(rules))
        while waiting:
            name = waiting.pop()
            self._results.clear()
            if name not in self._rules and self.has(rules[name]):
                self._rules.add(name)
                waiting += users[name]
            if self._num_checks > _MAX_CHECKS:
                raise grammar_error("the rules depend on each other in too many ways; simplify them")
        self._results.clear()

    def has(self, part: GbnfPart) -> bool:
        cached = self._results.get(id(part))
        if cached is None:
            self._num_checks += 1
            cached = self._results[id(part)] = self._compute(part)
        return cached

    def _compute(self, part: GbnfPart) -> bool:
        match part:
            case GbnfReference(name):
                return name in self._rules
            case GbnfSequence(parts):
                return all(self.has(inner) for inner in parts)
            case GbnfChoice(parts):
                return any(self.has(inner) for inner in parts)
            case GbnfRepeat(inner, min_count):
                return min_count == 0 or self.has(inner)
            case GbnfChars():
                return False


def _first_rules(part: GbnfPart, nullable: _NullableParts) -> Iterator[str]:
    """Yield the names of the rules that a part may start with."""
    match part:
        case GbnfReference(name):
            yield name
        case GbnfSequence(parts):
            for inner in parts:
                yield from _first_rules(inner, nullable)
                if not nullable.has(inner):
                    return
        case GbnfChoice(parts):
            for inner in parts:
                yield from _first_rules(inner, nullable)
        case GbnfRepeat(inner):
            yield from _first_rules(inner, nullable)


def _reject_left_recursion(rules: dict[str, GbnfPart], nullable: _NullableParts) -> None:
    """Raise InvalidRequest if a rule is left-recursive. The depth-first search visits each rule once."""
    done: set[str] = set()
    for origin in rules:
        path: dict[str, Iterator[str]] = {}  # the rules being visited, the outermost first
        following: str | None = None if origin in done else origin
        while path or following is not None:
            if following is not None:
                path[following] = iter(set(_first_rules(rules[following], nullable)))
            following = next((name for name in path[next(reversed(path))] if name not in done), None)
            if following in path:
                raise grammar_error(f"rule {following!r} starts with itself (left recursion); write it as a repetition")
            if following is None:
                done.add(path.popitem()[0])


class _Compiler:
    """Compiles parts into nodes, starting with the last part because each node refers to the node after it."""

    def __init__(self, rules: dict[str, GbnfPart], nullable: _NullableParts) -> None:
        self._rules = rules
        self._nullable = nullable
        self._program = Program()
        self._starts: dict[str, int] = {}

    def program(self, root: str) -> Program:
        waiting = [root]
        while waiting:  # only rules that the root refers to
            name = waiting.pop()
            if name not in self._starts:
                self._starts[name] = self._new(Fork(()))  # reserve a node that others can refer to
                waiting += _references(self._rules[name])
        for name, start in self._starts.items():
            self._program.nodes[start] = Fork((self._node(self._rules[name], END),))
        self._program.start = self._starts[root]
        return self._program

    def _new(self, node: Node) -> int:
        if len(self._program.nodes) >= limits.MAX_GRAMMAR_NODES:
            raise grammar_error(f"the limit of {limits.MAX_GRAMMAR_NODES} parts is exceeded; shorten the grammar")
        self._program.nodes.append(node)
        return len(self._program.nodes) - 1

    def _node(self, part: GbnfPart, after: int) -> int:
        match part:
            case GbnfChars(ranges):
                return self._chars(ranges, after)
            case GbnfReference(name):
                return self._new(RuleCall(self._starts[name], after))
            case GbnfSequence(parts):
                for inner in reversed(parts):
                    after = self._node(inner, after)
                return after
            case GbnfChoice(parts):
                return self._new(Fork(tuple(self._node(inner, after) for inner in parts)))
            case GbnfRepeat(inner, min_count, max_count):
                return self._repeat(inner, min_count, max_count, after)

    def _repeat(self, inner: GbnfPart, min_count: int, max_count: int | None, after: int) -> int:
        if self._nullable.has(inner):
            min_count = 0  # empty repetitions satisfy any minimum
            if max_count is not None and max_count > _MAX_NULLABLE_REPEATS:
                raise grammar_error(
                    f"a possibly empty part is repeated {max_count} times (limit {_MAX_NULLABLE_REPEATS}); "
                    "make the repeated part non-empty"
                )
        return self._new(Loop(self._node(inner, END), min_count, max_count, after))

    def _chars(self, ranges: tuple[tuple[int, int], ...], after: int) -> int:
        sequences = [each for low, high in ranges for each in utf8_sequences(low, high)]
        return self._edges(sequences, after, {})

    def _edges(self, sequences: list[Bytes], after: int, cached: dict[tuple[Bytes, ...], int]) -> int:
        """Return a node that matches any of these sequences of byte ranges.

        Sequences with the same remaining byte ranges share nodes.
        """
        key = tuple(sequences)
        if key not in cached:
            rests: dict[tuple[int, int], list[Bytes]] = {}
            for sequence in sequences:
                rests.setdefault(sequence[0], []).append(sequence[1:])
            ranges = [
                (low, high, self._edges(rest, after, cached) if rest[0] else after)
                for (low, high), rest in rests.items()
            ]
            cached[key] = self._new(Edges(tuple(ranges)))
        return cached[key]


Bytes = tuple[tuple[int, int], ...]  # a range for each byte of a character


def utf8_sequences(low: int, high: int) -> Iterator[Bytes]:
    """Yield byte ranges that match the UTF-8 encodings of all characters from `low` to `high`."""
    for first, last in _SAME_LENGTH:
        if low <= last and first <= high:
            yield from _same_length(max(low, first), min(high, last))


def _same_length(low: int, high: int) -> Iterator[Bytes]:
    for number in range(len(chr(high).encode()) - 1, 0, -1):
        mask = (1 << 6 * number) - 1  # bits of the last bytes
        if low & ~mask != high & ~mask:
            if low & mask:  # split off the part that starts in the middle of these bytes
                yield from _same_length(low, low | mask)
                yield from _same_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _same_length(low, (high & ~mask) - 1)
                yield from _same_length(high & ~mask, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
