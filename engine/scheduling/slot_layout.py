"""The layout of slots: keep decoding sequences in neighboring slots if this arrangement saves time.

If each slot has its own cells, llama.cpp computes slots with consecutive indices in one pass, and each hole between
busy slots causes another pass (docs/adr/008-holes.md). The layout fills holes and moves sequences. Callers pass in the
clock. Lists of slots are in ascending order. `cost` is a table of pass durations in seconds, indexed by the number of
rows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence as Seq
from itertools import pairwise
from typing import NamedTuple

from cellama.config.logging import event_logger
from cellama.engine.backend import Chunk
from cellama.engine.kvcache.manager import MIN_SAVED_TOKENS, KvCache

from .decode_costs import MOVE_TOKENS, DecodeCosts, MoveCosts
from .sequence import Sequence, SlotTable, SlotWork, work_of


class SlotRun(NamedTuple):
    """A run of slots with consecutive indices."""

    first: int
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class Cover(NamedTuple):
    """A choice of holes to fill, and the duration of the resulting decode call."""

    seconds: float  # duration of a decode call with these holes filled
    holes: list[int]  # slots to fill


def runs_of(slots: Seq[int]) -> list[SlotRun]:
    """Return these slots, grouped into runs."""
    runs: list[SlotRun] = []
    for slot in slots:
        if runs and runs[-1].end == slot:
            runs[-1] = SlotRun(runs[-1].first, runs[-1].size + 1)
        else:
            runs.append(SlotRun(slot, 1))
    return runs


def cheapest_cover(slots: Seq[int], can_fill: Callable[[int], bool], cost: Seq[float]) -> Cover:
    """Return the holes between these slots that are worth filling, because their rows cost less than the saved passes.

    The result is optimal. The holes are chosen by dynamic programming: the best cover of the first n runs is the best
    cover of fewer runs, followed by one pass for the remaining runs.
    """
    runs = runs_of(slots)
    bridgeable = [all(can_fill(slot) for slot in range(before.end, after.first)) for before, after in pairwise(runs)]
    best, since = [0.0], [0]  # for the first n runs: seconds, and the first run in the last pass
    for last, run in enumerate(runs):
        seconds, start = best[last] + cost[run.size], last
        for first in range(last - 1, -1, -1):
            if not bridgeable[first]:
                break
            candidate = best[first] + cost[run.end - runs[first].first]
            if candidate < seconds:
                seconds, start = candidate, first
        best.append(seconds)
        since.append(start)
    return Cover(best[-1], _holes(runs, since))


def _holes(runs: Seq[SlotRun], since: Seq[int]) -> list[int]:
    holes: list[int] = []
    last = len(runs)
    while last > 0:
        first = since[last]
        for before, after in pairwise(runs[first:last]):
            holes += range(before.end, after.first)
        last = first
    return sorted(holes)


def compacting_moves(slots: Seq[int], idle: Seq[int], weight: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return moves (from, to) of these slots to idle slots, after which the slots form as few runs as possible.

    The candidates are these slots and the idle slots, in order. A window slides over the candidates and contains as
    many of them as there are slots to place. A break is a position in the window at which the next candidate's index is
    not consecutive. The best window has the fewest breaks. Among windows with equally few breaks, the best window is
    the one for which the moved slots have the smallest total `weight`. Sequences outside the window move to idle slots
    inside the window.

    For example, assume that slots 0 and 3 are given, slots 1, 2 and 5 are idle, and slot 4 is not available. The
    candidates are 0, 1, 2, 3 and 5. Among the windows of two candidates, only (3, 5) has a break. If slot 3 has the
    largest weight, the best of the other windows is (2, 3), and the only move is (0, 2).
    """
    candidates, moving, count = sorted([*slots, *idle]), set(slots), len(slots)
    breaks = [0] + [int(after != before + 1) for before, after in pairwise(candidates)]
    gains = [weight[slot] if slot in moving else -weight[slot] for slot in candidates]
    num_breaks, gain = sum(breaks[1:count]), sum(gains[:count])
    best, start = (num_breaks, -gain), 0
    for first in range(1, len(candidates) - count + 1):
        num_breaks += breaks[first + count - 1] - breaks[first]
        gain += gains[first + count - 1] - gains[first - 1]
        if (num_breaks, -gain) < best:
            best, start = (num_breaks, -gain), first
    window = set(candidates[start : start + count])
    return list(zip(sorted(moving - window, reverse=True), sorted(window - moving), strict=True))


def adjacent_slot(running: Seq[int], empty: Seq[int]) -> int | None:
    """Return the best empty slot for another sequence, preferably a hole between running slots."""
    return next(iter(by_nearness(empty, running)), None)


def by_nearness(slots: Iterable[int], running: Iterable[int]) -> list[int]:
    """Sort slots by how well they fit next to the running slots: holes, then neighbours, then the rest by distance."""
    others = sorted(running)

    def distances(slot: int) -> tuple[int, int, int]:
        at = bisect(others, slot)
        near = [abs(other - slot) for other in others[max(0, at - 1) : at + 1]]
        return -near.count(1), min(near, default=0), slot

    return sorted(slots, key=distances)


def pass_rows_of(chunks: Seq[Chunk], *, unified: bool) -> list[int]:
    """Return the number of rows in each pass of a decode call. `chunks` are in slot order.

    If the cells are `unified`, the call is a single pass. Otherwise, llama.cpp combines slots that have consecutive
    indices and the same number of tokens.
    """
    lengths = [len(chunk.tokens) for chunk in chunks]
    is_one_run = chunks[-1].slot - chunks[0].slot + 1 == len(chunks) and lengths.count(lengths[0]) == len(lengths)
    if unified or is_one_run:
        return [sum(lengths)]
    slots: dict[int, list[int]] = {}
    for chunk in chunks:
        slots.setdefault(len(chunk.tokens), []).append(chunk.slot)
    return [length * run.size for length, of_length in slots.items() for run in runs_of(of_length)]


log = event_logger(__name__)

USUAL_OUTPUT_TOKENS = 64.0  # assumed length of an output before any has finished: short, so early moves must pay soon
LENGTH_WEIGHT = 0.05  # weight of a new length in the running mean: lengths vary a lot, so about the last 40 count
RECHECK_STEPS = 16  # steps until the same layout is evaluated again: costs change slowly, and evaluating takes time


class Move(NamedTuple):
    """A planned move of a running sequence.

    The target slot may contain bulk work or reusable cells, which are moved to the sequence's current slot.
    """

    sequence: Sequence
    slot: int  # its current slot
    target: int


class SlotLayout:
    """Fills holes between slots and moves sequences. Only the engine thread may use it."""

    def __init__(self, cache: KvCache, slots: SlotTable, costs: DecodeCosts, budget: int) -> None:
        """Create a layout for decode calls with at most `budget` rows."""
        self.is_active = not cache.memory.unified and len(slots) > 2  # a pool decodes any slots in one pass
        self.num_moves = 0  # total number of moves
        self._cache = cache
        self._slots = slots
        self._budget = budget
        self._decode_costs = costs
        self._move_costs = MoveCosts()
        self._one_for_each_pass = [0.0] + [1.0] * len(slots)
        self._output_tokens = USUAL_OUTPUT_TOKENS
        self._last_busy: list[int] = []  # busy slots for which the last layout was determined
        self._last_layout: list[int] = []
        self._settled_layout: list[int] = []  # a layout that needs no moves
        self._num_settled = 0  # number of steps for which this layout is not evaluated again

    # Filling holes

    def fill(self, works: list[SlotWork]) -> tuple[list[SlotWork], list[Chunk]]:
        """Fill the holes between single-token chunks with the next tokens of other slots, or with padding.

        The caller must remove the padding after the decode call with `remove_padding`, even if the call fails.
        """
        slots = [work.chunk.slot for work in works]
        if not self.is_active or slots[-1] - slots[0] + 1 == len(slots):
            return works, []
        if any(len(work.chunk.tokens) > 1 for work in works):
            return works, []
        adapters = works[0].sequence.adapters
        holes = self._holes_to_fill(slots, lambda slot: self._can_fill(slot, adapters))
        useful = [work_of(s, 1) for slot in holes if (s := self._slots[slot]) and s.adapters == adapters]
        filled = {work.chunk.slot for work in useful}
        padding = [self._padding(slot, works[0]) for slot in holes if slot not in filled]
        return sorted(works + useful, key=lambda work: work.chunk.slot), padding

    def _holes_to_fill(self, slots: list[int], can_fill: Callable[[int], bool]) -> list[int]:
        """Return which holes to fill: none, all, or only those that are expected to save time.

        The fastest choice is returned.
        """
        costs = self._decode_costs
        tables = costs.table(len(self._slots)), self._one_for_each_pass
        covers = [cheapest_cover(slots, can_fill, table) for table in tables]
        choices = [[], *(cover.holes for cover in covers if len(slots) + len(cover.holes) <= self._budget)]
        return min(
            choices, key=lambda holes: sum([costs.optimistic(run.size) for run in runs_of(sorted(slots + holes))])
        )

    def _can_fill(self, slot: int, adapters: Hashable) -> bool:
        holder = self._slots[slot]
        if holder is not None and holder.adapters == adapters:
            return holder.num_pending > 0
        return self._can_pad(slot)

    def _can_pad(self, slot: int) -> bool:
        """Return whether one more token fits into the slot and can be removed again.

        Call this method only if each slot has its own cells.
        """
        memory = self._cache.memory
        return memory.partial_reuse and self._cache.cells.of(slot) < memory.ctx_per_slot

    def _padding(self, slot: int, work: SlotWork) -> Chunk:
        """Return a padding row for the slot. The row can contain any token, because the row's result is not used."""
        return Chunk(slot, self._cache.cells.of(slot), work.chunk.tokens, samples=False, decode=False)

    def remove_padding(self, padding: Seq[Chunk]) -> None:
        """Remove padding rows by truncating the padded slots to their previous lengths."""
        for chunk in padding:
            self.restore_slot(chunk.slot)

    def restore_slot(self, slot: int) -> None:
        """Remove the slot's unrecorded cells. If an idle slot can't be truncated, discard its whole state."""
        num_cells = self._cache.cells.of(slot)
        if self._cache.truncate(slot, num_cells) < num_cells and self._slots[slot] is None:
            self._cache.wipe(slot)

    # Learning

    def observe_end(self, sequence: Sequence) -> None:
        """Learn from the length of a finished output."""
        if sequence.num_output:
            self._output_tokens += (sequence.num_output - self._output_tokens) * LENGTH_WEIGHT

    def expected_steps(self, sequence: Sequence) -> float:
        """Return the number of tokens that the sequence is still expected to generate.

        The lengths are assumed to be geometrically distributed, so the expected number doesn't depend on the tokens
        already generated.
        """
        return min(max(0.0, sequence.request.max_tokens - sequence.num_output), self._output_tokens)

    # Moving sequences

    @property
    def _may_move(self) -> bool:
        return self.is_active and self._decode_costs.is_measured

    def plan_moves(self) -> list[Move]:
        """Return moves that are expected to save more time than they cost by the time the sequences finish."""
        busy = self._slots.busy
        if len(busy) < 2 or not self._may_move:
            return []
        if busy is not self._last_busy:  # the list of busy slots is replaced with every change
            self._last_busy, self._last_layout = busy, self._layout()
        layout = self._last_layout
        if layout == self._settled_layout and self._num_settled > 0:
            self._num_settled -= 1
            return []
        for slots, targets in self._groups(busy):
            if moves := self._profitable_moves(slots, targets):
                return moves
        self._settled_layout, self._num_settled = layout, RECHECK_STEPS
        return []

    def _layout(self) -> list[int]:
        return [self._kind(slot) for slot in range(len(self._slots))]

    def _kind(self, slot: int) -> int:
        """Return the class of a slot's sequence: 3 (protected), 2 (interactive) or 1 (bulk), or 0 for an idle slot."""
        holder = self._slots[slot]
        return 0 if holder is None else 1 + holder.request.is_interactive + holder.request.is_protected

    def _groups(self, busy: Seq[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield groups of busy slots that are decoded together, each with the slots to which the group can move.

        All sequences in a group have the same adapters. If a group contains several classes, its protected slots also
        form a group, and so do its interactive slots. Few other rows are decoded together with these slots
        (strategies.py), so such a slot can also swap places with a slot of a less urgent class.
        """
        idle = self._slots.idle
        groups: dict[Hashable, list[int]] = {}
        for slot in busy:
            holder = self._slots[slot]
            assert holder is not None
            groups.setdefault(holder.adapters, []).append(slot)
        for group in groups.values():
            yield group, idle
            for kind in (2, 3):
                streams = [slot for slot in group if self._kind(slot) >= kind]
                if 0 < len(streams) < len(group):
                    others = set(group).difference(streams)
                    yield streams, sorted([*idle, *others])

    def _profitable_moves(self, slots: list[int], targets: list[int]) -> list[Move]:
        if not targets or slots[-1] - slots[0] + 1 == len(slots):
            return []
        weight = {slot: self._weight(slot) for slot in [*slots, *targets]}
        moves = [self._move(*pair) for pair in compacting_moves(slots, targets, weight)]
        if not moves:
            return []
        cost = self._decode_costs.table(len(self._slots))
        after = sorted({*slots} - {move.slot for move in moves} | {move.target for move in moves})
        before_s = cheapest_cover(slots, self._can_pad, cost).seconds
        saved_s = before_s - cheapest_cover(after, self._can_pad, cost).seconds
        steps = sum(self.expected_steps(move.sequence) for move in moves) / len(moves)
        return moves if saved_s * steps > sum(self._seconds_of(move) for move in moves) else []

    def _move(self, slot: int, target: int) -> Move:
        sequence = self._slots[slot]
        assert sequence is not None
        return Move(sequence, slot, target)

    def _weight(self, slot: int) -> int:
        """Return the cost of emptying or filling this slot, expressed as a number of moved tokens."""
        num_tokens = self._num_moved(slot)
        return num_tokens + MOVE_TOKENS if num_tokens else 0

    def _num_moved(self, slot: int) -> int:
        """Return the number of cells that a move from or to this slot must copy."""
        num_cells = self._cache.cells.of(slot)
        return num_cells if self._slots[slot] is not None or num_cells >= MIN_SAVED_TOKENS else 0

    def _seconds_of(self, move: Move) -> float:
        return sum(self._move_costs.of(self._num_moved(slot)) for slot in (move.slot, move.target))

    def execute(self, moves: Seq[Move], clock: Callable[[], float]) -> None:
        """Execute the moves one by one, until the next move would exceed the duration of one decode call.

        The contents of the target slot move to the sequence's previous slot. Lost cells are computed again.
        """
        started = clock()
        running = self._slots.busy
        allowed_s = cheapest_cover(running, self._can_pad, self._decode_costs.table(len(self._slots))).seconds
        for index, move in enumerate(moves):
            now = clock()
            if index and now - started + self._seconds_of(move) > allowed_s:
                break
            num_tokens = self._num_moved(move.slot) + self._num_moved(move.target)
            if not self._execute_move(move):
                self._settled_layout, self._num_settled = self._layout(), RECHECK_STEPS
                break
            self._move_costs.observe(num_tokens, clock() - now)
            self.num_moves += 1

    def _execute_move(self, move: Move) -> bool:
        """Execute a move, and return whether it succeeded."""
        sequence, slot, target = move
        other = self._slots[target]
        if other is None and not self._num_moved(target):
            self._cache.clear(target)
        try:
            if not self._cache.swap(slot, target):
                return False
        except Exception:  # the content of both slots is unknown
            log.exception("slot move failed", slot=slot, target=target, detail="the affected tokens will be recomputed")
            for index in (target, slot):
                self._cache.wipe(index)
            for each in (sequence, other):
                if each is not None:
                    each.truncate(0)
            return False
        for each in self._slots.swap(slot, target):
            assert each.slot is not None
            each.truncate(self._cache.cells.of(each.slot))
        return True
