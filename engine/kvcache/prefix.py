"""A radix tree over token ids, which finds the holders of KV states that share a prefix with a prompt."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)
Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Node(Generic[Holder]):
    """A tree node, which stores its subtree and the tokens on the edge from its parent."""

    edge: Tokens
    parent: _Node[Holder] | None
    scope: Hashable = None  # scope of a root node; None for other nodes
    num_holders: int = 0  # holders in this node and below
    ends: dict[Holder, None] = field(default_factory=dict)  # holders whose tokens end here, in insertion order
    children: dict[int, _Node[Holder]] = field(default_factory=dict)  # child nodes by the first token of their edge


class PrefixIndex(Generic[Holder]):
    """Finds the holders whose tokens share a prefix with a prompt. Holders in different scopes never match.

    The time for an insertion, a removal or the first match is proportional to the number of tokens, and does not depend
    on the number of holders.
    """

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[Holder]] = {}
        self._ends: dict[Holder, _Node[Holder]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._ends

    def insert(self, holder: Holder, tokens: Sequence[int], scope: Hashable = "") -> None:
        """Set a holder's tokens. A tuple is stored without being copied."""
        self.remove(holder)
        tokens, start = tuple(tokens), 0
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = _Node((), None, scope)
        node.num_holders += 1
        while start < len(tokens):
            child = node.children.get(tokens[start])
            if child is None:
                child = node.children[tokens[start]] = _Node(tokens[start:], node)
            shared = common_length(child.edge, tokens, start)
            if shared < len(child.edge):
                child = _split(child, shared)
            child.num_holders += 1
            node, start = child, start + shared
        node.ends[holder] = None
        self._ends[holder] = node

    def remove(self, holder: Holder) -> None:
        """Remove a holder and its tokens. Calling this method again has no effect."""
        node = self._ends.pop(holder, None)
        if node is not None:
            del node.ends[holder]
        while node is not None:
            parent = node.parent
            node.num_holders -= 1
            if parent is None:
                if not node.num_holders:
                    del self._roots[node.scope]
            elif not node.num_holders:
                del parent.children[node.edge[0]]
            elif len(node.children) == 1 and not node.ends:
                _merge_with_only_child(node)
            node = parent

    def entry_of(self, holder: Holder) -> tuple[Tokens, Hashable]:
        """Return a holder's tokens and scope. Raises KeyError if the holder is not in the index."""
        node = self._ends[holder]
        edges = [node.edge]
        while node.parent is not None:
            node = node.parent
            edges.append(node.edge)
        return tuple(chain.from_iterable(reversed(edges))), node.scope

    def matches(self, tokens: Sequence[int], scope: Hashable = "") -> Iterator[tuple[Holder, int]]:
        """Yield each holder in the scope that shares a prefix with `tokens`, with the prefix length, longest first.

        The tree must not change during the iteration.
        """
        below = None
        for node, length in reversed(self._walk(tuple(tokens), scope)):
            for holder in _holders(node, below):
                yield holder, length
            below = node

    def whole_matches(self, tokens: Sequence[int], scope: Hashable = "") -> Iterator[tuple[Holder, int]]:
        """Yield each holder in the scope whose tokens are a prefix of `tokens`, with its length, longest first."""
        path = self._walk(tuple(tokens), scope)
        starts = [0, *(length for _, length in path)]
        for (node, length), start in zip(reversed(path), reversed(starts[:-1]), strict=True):
            if length - start == len(node.edge):
                for holder in node.ends:
                    yield holder, length

    def shared_by(
        self, holders: Iterable[Holder], tokens: Sequence[int], scope: Hashable = ""
    ) -> Iterator[tuple[Holder, int]]:
        """Yield each given holder that shares a prefix with `tokens`, with the prefix length, in the given order."""
        lengths = {id(node): length for node, length in self._walk(tuple(tokens), scope)}
        for holder in holders:
            node = self._ends.get(holder)
            while node is not None and id(node) not in lengths:
                node = node.parent
            if node is not None:
                yield holder, lengths[id(node)]

    def of_scope(self, scope: Hashable) -> list[Holder]:
        """Return all holders in the scope."""
        root = self._roots.get(scope)
        return [] if root is None else list(_holders(root))

    def longest(self, tokens: Sequence[int], scope: Hashable = "") -> int:
        """Return the length of the longest prefix that any holder shares with `tokens`, or 0."""
        path = self._walk(tuple(tokens), scope)
        return path[-1][1] if path else 0

    def branches(self, tokens: Sequence[int], scope: Hashable = "", at_least: int = 1) -> list[int]:
        """Return the lengths at which holders diverge from `tokens` or end.

        A length is returned only if at least `at_least` holders share the prefix of this length.
        """
        path = self._walk(tuple(tokens), scope)
        return [length for node, length in path if node.num_holders >= at_least]

    def _walk(self, tokens: Tokens, scope: Hashable) -> list[tuple[_Node[Holder], int]]:
        """Return the nodes on the path of `tokens`, each with the number of tokens shared up to the end of the node."""
        path: list[tuple[_Node[Holder], int]] = []
        node, length = self._roots.get(scope), 0
        while node is not None and length < len(tokens):
            node = node.children.get(tokens[length])
            if node is None:
                break
            shared = common_length(node.edge, tokens, length)
            length += shared
            path.append((node, length))
            if shared < len(node.edge):
                break
        return path


def _holders(node: _Node[Holder], without: _Node[Holder] | None = None) -> Iterator[Holder]:
    """Yield the holders in this node and its subtree, except in the subtree of the child `without`."""
    yield from node.ends
    levels = [iter(node.children.values())]
    while levels:
        child = next(levels[-1], None)
        if child is None:
            levels.pop()
        elif child is not without:
            yield from child.ends
            levels.append(iter(child.children.values()))


def common_length(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """Return the length of the common prefix of `left` and `right[start:]`.

    Slices are compared before single tokens, because this is faster.
    """
    limit, done = min(len(left), len(right) - start), 0
    while done < limit:
        size = min(64, limit - done)
        if left[done : done + size] != right[start + done : start + done + size]:
            break
        done += size
    while done < limit and left[done] == right[start + done]:
        done += 1
    return done


def _split(node: _Node[Holder], length: int) -> _Node[Holder]:
    """Insert a new node above `node` for the first `length` tokens of its edge, and return the new node."""
    assert node.parent is not None
    head = _Node(
        edge=node.edge[:length],
        parent=node.parent,
        num_holders=node.num_holders,
        children={node.edge[length]: node},
    )
    node.parent.children[node.edge[0]] = head
    node.edge, node.parent = node.edge[length:], head
    return head


def _merge_with_only_child(node: _Node[Holder]) -> None:
    """Remove a node at which no holder ends, and prepend the node's edge to its only child's edge."""
    (child,) = node.children.values()
    assert node.parent is not None
    child.edge, child.parent = node.edge + child.edge, node.parent
    node.parent.children[child.edge[0]] = child
