"""Tests that the prefix index finds the same as a full search, and that cells are counted once."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cellama.engine.kvcache.manager import Cells
from cellama.engine.kvcache.prefix import PrefixIndex, common_length

from ....conftest import EXAMPLES

TOKENS = st.lists(st.integers(0, 2), max_size=12)  # few different tokens, for many shared prefixes and splits
LONG = st.builds(lambda head, body, tail: head + [7] * body + tail, TOKENS, st.integers(0, 200), TOKENS)
SCOPES = st.sampled_from(["", "tenant"])


def brute_force(entries: dict[int, tuple[list[int], str]], tokens: list[int], scope: str) -> dict[int, int]:
    found = {}
    for holder, (held, its_scope) in entries.items():
        length = 0
        while length < min(len(held), len(tokens)) and held[length] == tokens[length]:
            length += 1
        if its_scope == scope and length:
            found[holder] = length
    return found


class PrefixIndexMachine(RuleBasedStateMachine):
    """Inserts, replaces and removes entries in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index: PrefixIndex[int] = PrefixIndex()
        self.entries: dict[int, tuple[list[int], str]] = {}

    @rule(holder=st.integers(0, 5), tokens=TOKENS | LONG, scope=SCOPES)
    def insert(self, holder: int, tokens: list[int], scope: str) -> None:
        self.index.insert(holder, tokens, scope)
        self.entries[holder] = (tokens, scope)

    @rule(holder=st.integers(0, 5))
    def remove(self, holder: int) -> None:
        self.index.remove(holder)
        self.entries.pop(holder, None)

    @rule(tokens=TOKENS | LONG, scope=SCOPES)
    def search(self, tokens: list[int], scope: str) -> None:
        found = list(self.index.matches(tokens, scope))
        assert dict(found) == brute_force(self.entries, tokens, scope)
        assert len(dict(found)) == len(found)
        assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)
        assert dict(self.index.shared_by(range(6), tokens, scope)) == dict(found)
        whole = [(holder, length) for holder, length in found if length == len(self.entries[holder][0])]
        assert sorted(self.index.whole_matches(tokens, scope)) == sorted(whole)

    @rule(scope=SCOPES)
    def search_scope(self, scope: str) -> None:
        held = [holder for holder, (_, its_scope) in self.entries.items() if its_scope == scope]
        assert sorted(self.index.of_scope(scope)) == sorted(held)

    @invariant()
    def tokens_are_kept(self) -> None:
        assert all(self.index.entry_of(h) == (tuple(tokens), scope) for h, (tokens, scope) in self.entries.items())
        assert all(holder in self.index for holder in self.entries)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        """Check that every node has a holder, and that no chain of nodes could be a single node."""
        nodes = [child for root in self.index._roots.values() for child in root.children.values()]
        assert bool(self.index._roots) == bool(self.entries)
        while nodes:
            node = nodes.pop()
            children = list(node.children.values())
            assert node.num_holders == len(node.ends) + sum(child.num_holders for child in children) > 0
            assert node.edge
            assert len(children) != 1 or node.ends
            nodes += children


TestPrefixIndex = PrefixIndexMachine.TestCase
TestPrefixIndex.settings = settings(max_examples=50 * EXAMPLES, stateful_step_count=30, deadline=None)


def test_prefix_that_ends_inside_an_edge_is_found() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.insert("slot", [1, 2, 3, 4, 5, 6])
    assert list(index.matches([1, 2, 3, 9])) == [("slot", 3)]


@given(TOKENS | LONG, TOKENS | LONG, st.integers(0, 5))
def test_common_length_returns_the_same_result_as_a_plain_loop(left: list[int], right: list[int], start: int) -> None:
    behind = right[start:]
    expected = 0
    while expected < min(len(left), len(behind)) and left[expected] == behind[expected]:
        expected += 1
    assert common_length(left, right, min(start, len(right))) == expected


class CellsMachine(RuleBasedStateMachine):
    """Compares the counts with cells that are objects, where shared cells are the same object."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = Cells(3, 1000, shared=True)
        self.slots: list[list[object]] = [[], [], []]

    @rule(slot=st.integers(0, 2), count=st.integers(1, 9))
    def extend(self, slot: int, count: int) -> None:
        self.cells.extend(slot, count)
        self.slots[slot] += [object() for _ in range(count)]

    @rule(slot=st.integers(0, 2), count=st.integers(0, 30))
    def trim(self, slot: int, count: int) -> None:
        self.cells.trim(slot, count)
        del self.slots[slot][count:]

    @rule(source=st.integers(0, 2), to=st.integers(0, 2), count=st.integers(0, 30))
    def copy(self, source: int, to: int, count: int) -> None:
        if source != to:
            self.trim(to, 0)
            count = min(count, len(self.slots[source]))
            self.cells.copy(source, to, count)
            self.slots[to] = self.slots[source][:count]

    @invariant()
    def counts_are_those_of_distinct_objects(self) -> None:
        assert [self.cells.of(slot) for slot in range(3)] == list(map(len, self.slots))
        assert self.cells.used == len({id(cell) for slot in self.slots for cell in slot})
        for slot, held in enumerate(self.slots):
            others = {id(cell) for other in range(3) if other != slot for cell in self.slots[other]}
            assert self.cells.exclusive_to(slot) == sum(1 for cell in held if id(cell) not in others)


TestCells = CellsMachine.TestCase
TestCells.settings = settings(max_examples=50 * EXAMPLES, stateful_step_count=30, deadline=None)
