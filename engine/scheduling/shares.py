"""Fair shares: the service that fairness keys have received from the slots.

The job queues use the same rules (docs/fair-share.md). Keys form a tree. A node is a level of a key, such as
`org/team`, and the leaf `{key}/` represents the requests with exactly this key. Among a node's children, the one with
the least service per weight is served next. Service is measured in computed tokens, separately for each priority. The
rules follow VTC (arXiv 2401.00588).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import lru_cache
from itertools import chain, repeat

from .sequence import Sequence, SlotTable

MAX_IDLE_NODES = 2000  # nodes whose service is remembered while none of their sequences waits: about 300 kB

Service = tuple[float, ...]  # of each level of a key, from the root, in tokens per weight


@lru_cache(maxsize=10_000)
def _levels_of(key: str) -> tuple[tuple[str, str], ...]:
    """Return the nodes on a key's path, starting at the root, each with its parent."""
    names = key.split("/") if key else []
    nodes = ["", *("/".join(names[:end]) for end in range(1, len(names) + 1)), f"{key}/"]
    return tuple(zip(nodes[1:], nodes, strict=False))


class _Band:
    """The service that each node has received at one priority."""

    def __init__(self) -> None:
        self.service: defaultdict[str, float] = defaultdict(float)
        self.num_waiting: Counter[str] = Counter()  # waiting sequences below each node
        self._children: defaultdict[str, set[str]] = defaultdict(set)  # of each node: those with waiting sequences
        self._last: dict[str, str] = {}  # of each node: the last child that had waiting sequences

    def start_waiting(self, key: str, *, is_new: bool) -> None:
        """Count a waiting sequence at each level of its key.

        A node that had no waiting sequences may have received little service in the meantime. If the sequence is new,
        the node's service is raised to the lowest service of its siblings. As a result, an idle key can't accumulate
        precedence over its siblings.
        """
        for node, parent in _levels_of(key):
            if not self.num_waiting[node]:
                others = self._children[parent] or {self._last.get(parent, node)}
                if is_new:
                    self.service[node] = max(self.service[node], min(self.service[other] for other in others))
                self._children[parent].add(node)
            self.num_waiting[node] += 1

    def stop_waiting(self, key: str) -> None:
        """Remove a waiting sequence from the counts at each level of its key."""
        for node, parent in _levels_of(key):
            self.num_waiting[node] -= 1
            if not self.num_waiting[node]:
                del self.num_waiting[node]
                self._last[parent] = node
                self._children[parent].discard(node)
        if len(self.service) > 2 * MAX_IDLE_NODES + len(self.num_waiting):
            self._forget()

    def _forget(self) -> None:
        """Discard the idle nodes with the least service.

        If a discarded node becomes active again, its service is raised anyway.
        """
        idle = sorted(self.service.keys() - self.num_waiting.keys(), key=self.service.__getitem__)
        for node in idle[:-MAX_IDLE_NODES]:
            del self.service[node]
        self._last = {node: last for node, last in self._last.items() if last in self.service}
        self._children = defaultdict(set, {node: children for node, children in self._children.items() if children})


class FairShares:
    """Tracks the service of all fairness keys. All components of the scheduler share one object."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._bands: defaultdict[int, _Band] = defaultdict(_Band)

    def start_waiting(self, sequence: Sequence, *, is_new: bool) -> None:
        """Record that a sequence is waiting for a slot.

        `is_new` is False if the sequence is waiting because it has lost its slot.
        """
        band, key = self._bands[sequence.request.priority], sequence.request.share.key
        if is_new and not band.num_waiting[f"{key}/"] and any(s.request.share.key != key for s in self._slots.running):
            self.charge_running()
        band.start_waiting(key, is_new=is_new)

    def stop_waiting(self, sequence: Sequence) -> None:
        """Record that a waiting sequence has received a slot or has finished."""
        self._bands[sequence.request.priority].stop_waiting(sequence.request.share.key)

    def charge(self, sequence: Sequence, *, is_leaving: bool = False) -> None:
        """Charge a running sequence's fairness key for the tokens computed since the last charge.

        `is_leaving` is true if the sequence is about to lose its slot.
        """
        share, tokens = sequence.request.share, sequence.take_uncharged(is_leaving=is_leaving)
        service = self._bands[sequence.request.priority].service
        for (node, _), weight in zip(_levels_of(share.key), chain(share.weights, repeat(1.0)), strict=False):
            service[node] += tokens / weight

    def charge_running(self) -> None:
        """Charge the fairness keys of all running sequences. Charging is needed only before services are compared."""
        for sequence in self._slots.running:
            self.charge(sequence)

    def of(self, priority: int, key: str) -> Service:
        """Return the service that a key has received at each of its levels.

        The key with the smallest return value is served next.
        """
        service = self._bands[priority].service
        return tuple([service.get(node, 0.0) for node, _ in _levels_of(key)])

    def services(self, running: list[Sequence]) -> dict[Sequence, Service]:
        """Return the service that each sequence's fairness key has received.

        If all sequences have the same key, each result is an empty tuple.
        """
        if len({s.request.share.key for s in running}) < 2:
            return dict.fromkeys(running, ())
        self.charge_running()
        return {s: self.of(s.request.priority, s.request.share.key) for s in running}
