"""Which sequence has which slot."""

from __future__ import annotations

from collections.abc import Iterator

from .sequence import Sequence


class SlotTable:
    """The sequence of each slot, None where a slot is idle. The scheduler and its parts share one."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_slots

    def __getitem__(self, slot: int) -> Sequence | None:
        return self._holders[slot]

    def __iter__(self) -> Iterator[Sequence | None]:
        return iter(self._holders)

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have a slot, in order of slots."""
        return [holder for holder in self._holders if holder is not None]

    @property
    def busy(self) -> list[int]:
        return [slot for slot, holder in enumerate(self._holders) if holder is not None]

    @property
    def idle(self) -> list[int]:
        return [slot for slot, holder in enumerate(self._holders) if holder is None]

    def assign(self, slot: int, sequence: Sequence) -> None:
        """Give an idle slot to a sequence."""
        self._holders[slot], sequence.slot = sequence, slot

    def release(self, sequence: Sequence) -> int:
        """Take a sequence's slot away, and return it."""
        slot = sequence.slot
        assert slot is not None
        self._holders[slot], sequence.slot = None, None
        return slot

    def swap(self, slot: int, other: int) -> list[Sequence]:
        """Exchange the sequences of two slots, of which one may be idle; return those that have moved."""
        self._holders[slot], self._holders[other] = self._holders[other], self._holders[slot]
        moved = []
        for index in (slot, other):
            if (holder := self._holders[index]) is not None:
                holder.slot = index
                moved.append(holder)
        return moved
