"""Which holders of KV states begin like a prompt: a radix tree over token ids. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)
Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Node(Generic[Holder]):
    """The tokens from its parent to here, and every holder whose tokens run through all of them."""

    edge: Tokens
    parent: _Node[Holder] | None
    holders: dict[Holder, None] = field(default_factory=dict)  # a set with an order: the same choice in every run
    children: dict[int, _Node[Holder]] = field(default_factory=dict)  # by the first token of their edge


class PrefixIndex(Generic[Holder]):
    """The tokens of every holder. Holders of different scopes never meet."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node[Holder]] = {}
        self._ends: dict[Holder, _Node[Holder]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._ends

    def insert(self, holder: Holder, tokens: Sequence[int], scope: Hashable = "") -> None:
        """The holder has these tokens from now on, instead of what it had."""
        self.remove(holder)
        node, rest = self._roots.setdefault(scope, _Node((), None)), tuple(tokens)
        node.holders[holder] = None
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = _Node(rest, node)
            shared = common_length(child.edge, rest)
            if shared < len(child.edge):
                child = _split(child, shared)
            child.holders[holder] = None
            node, rest = child, rest[shared:]
        self._ends[holder] = node

    def remove(self, holder: Holder) -> None:
        """The holder has nothing any more. Idempotent."""
        node = self._ends.pop(holder, None)
        while node is not None:
            parent = node.parent
            node.holders.pop(holder, None)
            if parent is None:
                self._forget_root(node)
            elif not node.holders:
                del parent.children[node.edge[0]]
            elif len(node.children) == 1:
                _merge_with_only_child(node)
            node = parent

    def _forget_root(self, root: _Node[Holder]) -> None:
        if not root.holders:
            self._roots = {scope: node for scope, node in self._roots.items() if node is not root}

    def tokens_of(self, holder: Holder) -> Tokens:
        """The tokens that the holder was inserted with. Raises KeyError."""
        edges, node = [], self._ends[holder]
        while node.parent is not None:
            edges.append(node.edge)
            node = node.parent
        return tuple(token for edge in reversed(edges) for token in edge)

    def matches(self, tokens: Sequence[int], scope: Hashable = "") -> Iterator[tuple[Holder, int]]:
        """Every holder of the scope that shares a prefix with `tokens`, and its length; the longest first."""
        path = self._walk(tuple(tokens), scope)
        seen: set[Holder] = set()
        for node, length in reversed(path):
            for holder in [holder for holder in node.holders if holder not in seen]:
                yield holder, length
            seen.update(node.holders)

    def longest(self, tokens: Sequence[int], scope: Hashable = "") -> int:
        """How many tokens the best match shares with `tokens`; 0 if there is none."""
        path = self._walk(tuple(tokens), scope)
        return path[-1][1] if path else 0

    def _walk(self, tokens: Tokens, scope: Hashable) -> list[tuple[_Node[Holder], int]]:
        """The nodes that `tokens` run through or end in, each with the number of tokens shared with it."""
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


def common_length(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """How many tokens `left` shares with `right[start:]`. Compares slices first: those are compared in C."""
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
    """Puts a node for the first `length` tokens of an edge before it, and returns that."""
    assert node.parent is not None
    head = _Node(node.edge[:length], node.parent, dict(node.holders), {node.edge[length]: node})
    node.parent.children[node.edge[0]] = head
    node.edge, node.parent = node.edge[length:], head
    return head


def _merge_with_only_child(node: _Node[Holder]) -> None:
    """Takes a node out when all its holders run on into its only child, which keeps their ends."""
    (child,) = node.children.values()
    if len(child.holders) == len(node.holders) and node.parent is not None:
        child.edge, child.parent = node.edge + child.edge, node.parent
        node.parent.children[child.edge[0]] = child
