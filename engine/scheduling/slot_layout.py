"""Keep slots that decode side by side, as far as that costs less than it saves (docs/adr/008-holes.md).

llama.cpp with a stream of cells per slot computes slots with consecutive indices in one pass; a hole between them
begins another. Pure: times come from a clock that is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence as Seq
from typing import NamedTuple

from cellama.engine.backend import Chunk
from cellama.engine.kvcache.manager import WORTH_SAVING_TOKENS, KvCache

from .decode_costs import MOVE_TOKENS, DecodeCosts, MoveCosts
from .neighbours import cheapest_cover, moves_together, runs_of
from .sequence import Sequence, SlotWork, work_of
from .slots import SlotTable

log = logging.getLogger(__name__)

USUAL_OUTPUT_TOKENS = 64.0  # of a sequence, before any has ended: a short answer, so early moves have to pay soon
LENGTH_WEIGHT = 0.05  # of a new length in the running mean: lengths vary much, so the last 40 or so count
LOOK_AGAIN = 16  # steps after which the same layout is weighed again: costs change slowly, and weighing takes time


class Move(NamedTuple):
    """A running sequence moves to another slot; what is there moves the other way, also a bulk sequence that runs."""

    sequence: Sequence
    slot: int  # where it is
    target: int


class SlotLayout:
    """Fills holes and moves sequences. Engine thread only."""

    def __init__(self, cache: KvCache, slots: SlotTable, costs: DecodeCosts, budget: int) -> None:
        """A decode call has at most `budget` rows."""
        self.is_active = not cache.memory.unified and len(slots) > 2  # one pool: any slots are decoded in one pass
        self.num_moves = 0  # since the start
        self._cache = cache
        self._slots = slots
        self._budget = budget
        self._decode_costs = costs
        self._move_costs = MoveCosts()
        self._one_for_each_pass = [0.0] + [1.0] * len(slots)
        self._output_tokens = USUAL_OUTPUT_TOKENS
        self._kept_layout: list[int] = []  # is left as it is …
        self._num_kept = 0  # … for so many steps more

    # Filling

    def fill(self, works: list[SlotWork]) -> tuple[list[SlotWork], list[Chunk]]:
        """Return single tokens with what fills the holes between them: the next tokens of other slots, and padding.

        Padding is a token that is taken off again (`take_off`) after the decode call, whatever becomes of that.
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
        """Return the holes to fill: none, all or what is expected to be cheapest, whichever may well be the best."""
        costs = self._decode_costs
        tables = costs.table(len(self._slots)), self._one_for_each_pass
        covers = [cheapest_cover(slots, can_fill, table) for table in tables]
        choices = [[], *(cover.holes for cover in covers if len(slots) + len(cover.holes) <= self._budget)]
        return min(choices, key=lambda holes: sum([costs.hoped(run.size) for run in runs_of(sorted(slots + holes))]))

    def _can_fill(self, slot: int, adapters: Hashable) -> bool:
        holder = self._slots[slot]
        if holder is not None and holder.adapters == adapters:
            return holder.num_pending > 0
        return self._can_pad(slot)

    def _can_pad(self, slot: int) -> bool:
        """Return whether one more token can be taken off again. In a stream of its own it takes no cell from others."""
        memory = self._cache.memory
        return memory.partial_reuse and self._cache.cells.of(slot) < memory.ctx_per_slot

    def _padding(self, slot: int, work: SlotWork) -> Chunk:
        """Return a row of which nothing is used: any token will do."""
        return Chunk(slot, self._cache.cells.of(slot), work.chunk.tokens, samples=False, decode=False)

    def take_off(self, padding: Seq[Chunk]) -> None:
        """Cut padded slots back to what they held before."""
        for chunk in padding:
            self.restore_slot(chunk.slot)

    def restore_slot(self, slot: int) -> None:
        """Cut the device's cells of a slot back to those that are accounted; a state that can't be cut is forgotten."""
        num_cells = self._cache.cells.of(slot)
        if self._cache.truncate(slot, num_cells) < num_cells and self._slots[slot] is None:
            self._cache.wipe(slot)

    # Learning

    def observe_end(self, sequence: Sequence) -> None:
        """Learn the length of an output that has ended."""
        if sequence.num_output:
            self._output_tokens += (sequence.num_output - self._output_tokens) * LENGTH_WEIGHT

    def steps_left(self, sequence: Sequence) -> float:
        """Return the tokens that it will probably still generate.

        Lengths are taken to be geometric, so what it has generated says nothing.
        """
        return min(max(0.0, sequence.request.max_tokens - sequence.num_output), self._output_tokens)

    # Moving

    @property
    def _may_move(self) -> bool:
        return self.is_active and self._decode_costs.is_measured

    def plan_moves(self) -> list[Move]:
        """Plan moves that cost less than they save over what their sequences will probably still generate."""
        busy = self._slots.busy
        if not self._may_move or len(busy) < 2:
            return []
        layout = self._layout()
        if layout == self._kept_layout and self._num_kept > 0:
            self._num_kept -= 1
            return []
        for own, places in self._groups(busy):
            if moves := self._worthwhile(own, places):
                return moves
        self._kept_layout, self._num_kept = layout, LOOK_AGAIN
        return []

    def _layout(self) -> list[int]:
        return [self._kind(slot) for slot in range(len(self._slots))]

    def _kind(self, slot: int) -> int:
        """Return what decides where the slot's sequence should lie: 0 idle, 1 bulk, 2 interactive."""
        holder = self._slots[slot]
        return 0 if holder is None else 1 + holder.request.is_interactive

    def _groups(self, busy: Seq[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the busy slots that are decoded together, with the same adapters, and the idle ones where they can go.

        Of these the interactive ones again: few others decode with them (bulk_policy.py), and change places with them.
        """
        idle = self._slots.idle
        groups: dict[Hashable, list[int]] = {}
        for slot in busy:
            holder = self._slots[slot]
            assert holder is not None
            groups.setdefault(holder.adapters, []).append(slot)
        for group in groups.values():
            yield group, idle
            streams = [slot for slot in group if self._kind(slot) > 1]
            if 0 < len(streams) < len(group):
                bulk = set(group).difference(streams)
                yield streams, sorted([*idle, *bulk])

    def _worthwhile(self, own: list[int], places: list[int]) -> list[Move]:
        if not places or own[-1] - own[0] + 1 == len(own):
            return []
        weight = {slot: self._weight(slot) for slot in [*own, *places]}
        moves = [self._move(*pair) for pair in moves_together(own, places, weight)]
        if not moves:
            return []
        cost = self._decode_costs.table(len(self._slots))
        after = sorted({*own} - {move.slot for move in moves} | {move.target for move in moves})
        saved_s = cheapest_cover(own, self._can_pad, cost).seconds - cheapest_cover(after, self._can_pad, cost).seconds
        steps = sum(self.steps_left(move.sequence) for move in moves) / len(moves)
        return moves if saved_s * steps > sum(self._seconds_of(move) for move in moves) else []

    def _move(self, slot: int, target: int) -> Move:
        sequence = self._slots[slot]
        assert sequence is not None
        return Move(sequence, slot, target)

    def _weight(self, slot: int) -> int:
        """Return the tokens whose moving costs as much as emptying this slot, or using it."""
        num_tokens = self._num_moved(slot)
        return num_tokens + MOVE_TOKENS if num_tokens else 0

    def _num_moved(self, slot: int) -> int:
        """Return the cells that a move to or from this slot takes along."""
        num_cells = self._cache.cells.of(slot)
        return num_cells if self._slots[slot] is not None or num_cells >= WORTH_SAVING_TOKENS else 0

    def _seconds_of(self, move: Move) -> float:
        return sum(self._move_costs.of(self._num_moved(slot)) for slot in (move.slot, move.target))

    def carry_out(self, moves: Seq[Move], clock: Callable[[], float]) -> None:
        """Move one sequence after another, as long as that takes no longer than a decode call.

        What the idle slots have goes the other way. What gets lost is computed again.
        """
        started = clock()
        running = self._slots.busy
        allowed_s = cheapest_cover(running, self._can_pad, self._decode_costs.table(len(self._slots))).seconds
        for index, move in enumerate(moves):
            now = clock()
            if index and now - started + self._seconds_of(move) > allowed_s:
                break
            num_tokens = self._num_moved(move.slot) + self._num_moved(move.target)
            if not self._carry_out(move):
                self._kept_layout, self._num_kept = self._layout(), LOOK_AGAIN
                break
            self._move_costs.observe(num_tokens, clock() - now)
            self.num_moves += 1

    def _carry_out(self, move: Move) -> bool:
        """Return False if it could not be moved."""
        sequence, slot, target = move
        other = self._slots[target]
        if other is None and not self._num_moved(target):
            self._cache.clear(target)
        try:
            if not self._cache.swap(slot, target):
                return False
        except Exception:  # what the two hold is unknown
            log.exception("a slot could not be moved; its sequence is computed again")
            for index in (target, slot):
                self._cache.wipe(index)
            for each in (sequence, other):
                if each is not None:
                    each.cut_back(0)
            return False
        for each in self._slots.swap(slot, target):
            assert each.slot is not None
            each.cut_back(self._cache.cells.of(each.slot))
        return True
