"""A grammar as a program over bytes: the nodes that the automaton of `automaton.py` walks. Pure.

Counted repetitions stay loops, characters become ranges of UTF-8 bytes, so a program is not much larger than its text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cellama.config import limits

from . import gbnf
from .gbnf import GbnfChars, GbnfChoice, GbnfPart, GbnfReference, GbnfRepeat, GbnfSequence, bad_grammar

# Ranges of code points whose UTF-8 has the same number of bytes; surrogates have none.
_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, gbnf.MAX_CODE_POINT))
_MAX_EMPTY_REPEATS = 64  # of a part that may be empty: they are walked through without a byte between
_MAX_LOOKS = 10 * limits.MAX_GRAMMAR_NODES  # at parts, to see which may be empty
END = 0  # the node at which a rule ends


@dataclass(frozen=True, slots=True)
class Edges:
    """One byte of one of these ranges, and the node after it. The ranges are apart from each other."""

    ranges: tuple[tuple[int, int, int], ...]  # lowest and highest byte, node


@dataclass(frozen=True, slots=True)
class Fork:
    """Each of these nodes comes next."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RuleCall:
    """The rule that begins at `start`, then node `after`."""

    start: int
    after: int


@dataclass(frozen=True, slots=True)
class Loop:
    """What begins at `body` and ends in END, from `least` to `most` times, then node `after`."""

    body: int
    least: int
    most: int | None
    after: int


Node = Edges | Fork | RuleCall | Loop | None  # None: END


@dataclass(slots=True)
class Program:
    """Nodes by number, and the one that the root rule begins at."""

    nodes: list[Node] = field(default_factory=lambda: [None])
    start: int = END


def compile_grammar(text: str, root: str) -> Program:
    """The program of a grammar. Raises InvalidRequest for what is none, or too large, or recursive to the left."""
    rules = gbnf.parse(text)
    if root not in rules:
        raise bad_grammar(f"it has no rule {root!r}")
    empty = _Emptiness(rules)
    _refuse_left_recursion(rules, empty)
    return _Compiler(rules, empty).program(root)


def _references(part: GbnfPart) -> Iterator[str]:
    match part:
        case GbnfReference(name):
            yield name
        case GbnfSequence(parts) | GbnfChoice(parts):
            for inner in parts:
                yield from _references(inner)
        case GbnfRepeat(inner):
            yield from _references(inner)


class _Emptiness:
    """Which parts may match the empty text."""

    def __init__(self, rules: dict[str, GbnfPart]) -> None:
        """Looks at a rule again whenever one that it refers to turns out so. Raises InvalidRequest."""
        self._rules: set[str] = set()
        self._known: dict[int, bool] = {}  # by id of the part, once the rules are known
        users: dict[str, list[str]] = {name: [] for name in rules}
        for name, part in rules.items():
            for inner in set(_references(part)):
                if inner not in rules:
                    raise bad_grammar(f"it refers to the rule {inner!r}, which it does not have")
                users[inner].append(name)
        self._looks = 0
        waiting = list(reversed(rules))
        while waiting:
            name = waiting.pop()
            self._known.clear()
            if name not in self._rules and self.of(rules[name]):
                self._rules.add(name)
                waiting += users[name]
            if self._looks > _MAX_LOOKS:
                raise bad_grammar("its rules depend on each other in too many ways; make it simpler")
        self._known.clear()

    def of(self, part: GbnfPart) -> bool:
        known = self._known.get(id(part))
        if known is None:
            self._looks += 1
            known = self._known[id(part)] = self._look(part)
        return known

    def _look(self, part: GbnfPart) -> bool:
        match part:
            case GbnfReference(name):
                return name in self._rules
            case GbnfSequence(parts):
                return all(self.of(inner) for inner in parts)
            case GbnfChoice(parts):
                return any(self.of(inner) for inner in parts)
            case GbnfRepeat(inner, least):
                return least == 0 or self.of(inner)
            case GbnfChars():
                return False


def _first(part: GbnfPart, empty: _Emptiness) -> Iterator[str]:
    """The rules that a part may begin with."""
    match part:
        case GbnfReference(name):
            yield name
        case GbnfSequence(parts):
            for inner in parts:
                yield from _first(inner, empty)
                if not empty.of(inner):
                    return
        case GbnfChoice(parts):
            for inner in parts:
                yield from _first(inner, empty)
        case GbnfRepeat(inner):
            yield from _first(inner, empty)


def _refuse_left_recursion(rules: dict[str, GbnfPart], empty: _Emptiness) -> None:
    """Each rule is looked at once: depth first, with a stack of our own."""
    done: set[str] = set()
    for origin in rules:
        path: dict[str, Iterator[str]] = {}  # the rules that are open, from the outermost on
        following: str | None = None if origin in done else origin
        while path or following is not None:
            if following is not None:
                path[following] = iter(set(_first(rules[following], empty)))
            following = next((name for name in path[next(reversed(path))] if name not in done), None)
            if following in path:
                raise bad_grammar(f"rule {following!r} begins with itself (left recursion); write it as a repetition")
            if following is None:
                done.add(path.popitem()[0])


class _Compiler:
    """Parts become nodes from their ends to their beginnings: a node knows what comes after it."""

    def __init__(self, rules: dict[str, GbnfPart], empty: _Emptiness) -> None:
        self._rules = rules
        self._empty = empty
        self._program = Program()
        self._starts: dict[str, int] = {}

    def program(self, root: str) -> Program:
        waiting = [root]
        while waiting:  # only the rules that the root needs
            name = waiting.pop()
            if name not in self._starts:
                self._starts[name] = self._new(Fork(()))  # a place that others can refer to
                waiting += _references(self._rules[name])
        for name, start in self._starts.items():
            self._program.nodes[start] = Fork((self._node(self._rules[name], END),))
        self._program.start = self._starts[root]
        return self._program

    def _new(self, node: Node) -> int:
        if len(self._program.nodes) >= limits.MAX_GRAMMAR_NODES:
            raise bad_grammar(f"it has more than {limits.MAX_GRAMMAR_NODES} parts; make it smaller")
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
            case GbnfRepeat(inner, least, most):
                return self._repeat(inner, least, most, after)

    def _repeat(self, inner: GbnfPart, least: int, most: int | None, after: int) -> int:
        if self._empty.of(inner):
            least = 0  # as often as it takes, with nothing
            if most is not None and most > _MAX_EMPTY_REPEATS:
                raise bad_grammar(
                    f"it repeats {most} times what may be empty, and the limit of that is {_MAX_EMPTY_REPEATS}; "
                    "make what is repeated not empty"
                )
        return self._new(Loop(self._node(inner, END), least, most, after))

    def _chars(self, ranges: tuple[tuple[int, int], ...], after: int) -> int:
        sequences = [each for low, high in ranges for each in utf8_sequences(low, high)]
        return self._edges(sequences, after, {})

    def _edges(self, sequences: list[Bytes], after: int, known: dict[tuple[Bytes, ...], int]) -> int:
        """A node for sequences of byte ranges; those that go on alike share the nodes of their rest."""
        key = tuple(sequences)
        if key not in known:
            rests: dict[tuple[int, int], list[Bytes]] = {}
            for sequence in sequences:
                rests.setdefault(sequence[0], []).append(sequence[1:])
            ranges = [
                (low, high, self._edges(rest, after, known) if rest[0] else after)
                for (low, high), rest in rests.items()
            ]
            known[key] = self._new(Edges(tuple(ranges)))
        return known[key]


Bytes = tuple[tuple[int, int], ...]  # ranges of the bytes of a character, one after another


def utf8_sequences(low: int, high: int) -> Iterator[Bytes]:
    """The UTF-8 of all characters from `low` to `high`, as ranges for each of their bytes."""
    for first, last in _LENGTHS:
        if low <= last and first <= high:
            yield from _same_length(max(low, first), min(high, last))


def _same_length(low: int, high: int) -> Iterator[Bytes]:
    for number in range(len(chr(high).encode()) - 1, 0, -1):
        mask = (1 << 6 * number) - 1  # of the last bytes
        if low & ~mask != high & ~mask:
            if low & mask:  # first what begins in the middle of these bytes, then the rest
                yield from _same_length(low, low | mask)
                yield from _same_length((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from _same_length(low, (high & ~mask) - 1)
                yield from _same_length(high & ~mask, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))
