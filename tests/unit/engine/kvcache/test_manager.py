"""Tests of the KV cache on the fake backend, whose states have one byte per token: what is copied, saved and reused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from cellama.engine.backend import Chunk
from cellama.engine.fake import FakeBackend, FakeState
from cellama.engine.kvcache.manager import MOVE_COST_TOKENS, MOVED_PER_TOKEN, Cells, KvCache, Placement


@dataclass
class CountingBackend(FakeBackend):
    """A fake backend that records each saved slot."""

    saved: list[int] = field(default_factory=list)
    on_save: Any = None

    def save(self, slot: int) -> FakeState:
        self.saved.append(slot)
        if self.on_save is not None:
            self.on_save()
        return super().save(slot)


def fill(cache: KvCache, slot: int, tokens: list[int]) -> None:
    """Run a sequence of these tokens in the slot until it finishes."""
    cache.assign_slot(Placement(slot, None, 0), tokens, "")
    backend = cache.memory
    assert isinstance(backend, FakeBackend)
    backend.decode([Chunk(slot, 0, tokens, samples=False)])
    cache.extend(slot, len(tokens))
    cache.retire(slot, tokens, "", save=True)


def new_cache(ram_bytes: int = 10_000, **options: Any) -> tuple[KvCache, CountingBackend]:
    backend = CountingBackend(**{"n_slots": 3, "ctx_per_slot": 4000, "n_batch": 4000, **options})
    return KvCache(backend, ram_bytes), backend


def test_state_larger_than_the_quota_is_not_copied() -> None:
    cache, backend = new_cache(ram_bytes=99)
    fill(cache, 0, [1] * 100)
    assert cache.save_one_idle()
    assert (backend.saved, len(cache.ram)) == ([], 0)


def test_quota_is_respected_while_a_state_is_copied() -> None:
    cache, backend = new_cache(ram_bytes=250)
    used: list[int] = []
    backend.on_save = lambda: used.append(cache.ram.used_bytes + 100)
    for slot in range(3):
        fill(cache, slot, [slot] * 100)
    while cache.save_one_idle():
        pass
    assert used == [100, 200, 200]
    assert (len(cache.ram), cache.ram.num_evictions) == (2, 1)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("is_cheap", [False, True])
def test_prefix_is_copied_only_if_copying_costs_less_than_it_saves(unified: bool, is_cheap: bool) -> None:
    cache, _ = new_cache(ram_bytes=0, unified=unified)
    shared = MOVE_COST_TOKENS + 3000 // MOVED_PER_TOKEN + (1 if is_cheap else 0)
    fill(cache, 0, list(range(3000)))
    placement = cache.find_slot([*range(shared), -1, -2], "", idle=[1, 2])
    assert placement.source == (0 if is_cheap or unified else None)  # a pool shares cells and moves nothing


def test_saved_state_stays_in_ram_when_the_pool_has_too_few_cells() -> None:
    cache, _ = new_cache(unified=True, n_cells=400)
    fill(cache, 0, list(range(300)))
    cache.clear(0)
    fill(cache, 1, [7] * 150)
    longer = [*range(200), -1]
    placement = cache.find_slot(longer, "", idle=[0, 2])
    assert cache.missing_cells(placement, len(longer)) == 300 - 250
    assert cache.assign_slot(placement, longer, "") == 0
    assert len(cache.ram) == 1
    cache.clear(placement.slot)
    assert cache.reclaim([1], 50)
    assert cache.assign_slot(cache.find_slot(longer, "", idle=[0, 2]), longer, "") == 200


def test_state_that_cannot_be_restored_is_dropped() -> None:
    cache, backend = new_cache()
    fill(cache, 0, list(range(300)))
    cache.clear(0)
    backend.restore = lambda *_: False  # type: ignore[method-assign]
    placement = cache.find_slot([*range(200), -1], "", idle=[0, 1, 2])
    assert cache.assign_slot(placement, [*range(200), -1], "") == 0
    assert (len(cache.ram), cache.cells.used) == (0, 0)


def test_reclaim_empties_no_slot_when_too_few_cells_would_become_free() -> None:
    cache, _ = new_cache(unified=True, n_cells=1000)
    fill(cache, 0, [1] * 300)
    fill(cache, 1, [2] * 300)
    assert not cache.reclaim([0, 1], 601)
    assert cache.cells.used == 600
    assert cache.reclaim([0, 1], 300)
    assert cache.cells.used == 300


def test_freed_by_includes_cells_that_only_the_given_slots_share() -> None:
    cells = Cells(4, 100, shared=True)
    cells.extend(0, 10)
    cells.copy(0, 1, 6)
    cells.copy(0, 2, 4)
    cells.extend(1, 5)
    assert [cells.freed_by(slots) for slots in ([0], [1], [0, 1], [0, 1, 2], [])] == [4, 5, 11, 15, 0]


def test_sliding_window_is_reused_in_its_slot_and_only_completely_from_ram() -> None:
    cache, backend = new_cache(window=50)

    def longest(shared: int) -> int:
        return cache.longest_prefix([*range(shared), -1], "")

    fill(cache, 0, list(range(300)))
    assert [longest(shared) for shared in (20, 200, 300)] == [20, 200, 300]
    backend.lose_what_the_window_passed(0)
    assert [longest(shared) for shared in (20, 200, 299, 300)] == [0, 0, 0, 300]
    cache.clear(0)
    assert [longest(shared) for shared in (20, 200, 300)] == [0, 0, 300]


def test_saved_state_replaces_a_shorter_state_if_the_longer_state_can_be_truncated() -> None:
    for window, num_states in ((0, 1), (50, 2), (400, 1)):
        cache, _ = new_cache(window=window)
        for length in (200, 300):
            fill(cache, 0, list(range(length)))
            cache.clear(0)
        assert len(cache.ram) == num_states


def checkpointed(cache: KvCache, slot: int, tokens: list[int], *lengths: int) -> None:
    """Fill a slot like `fill`, and take checkpoints at these lengths."""
    cache.assign_slot(Placement(slot, None, 0), tokens, "")
    backend = cache.memory
    assert isinstance(backend, FakeBackend)
    for start, end in zip((0, *lengths), (*lengths, len(tokens)), strict=True):
        backend.decode([Chunk(slot, start, tokens[start:end], samples=False)])
        cache.extend(slot, end - start)
        if end in lengths:
            cache.take_checkpoint(slot)
    cache.retire(slot, tokens, "", save=True)


def test_checkpoints_are_kept_with_copied_saved_and_restored_states_and_count_once() -> None:
    cache, backend = new_cache(partial_reuse=False)
    tokens = list(range(400))
    checkpointed(cache, 0, tokens, 100, 200, 300)
    assert cache.longest_prefix([*tokens[:250], -1], "") == 200
    placement = cache.find_slot([*tokens[:250], -1], "", idle=[1, 2])
    assert cache.assign_slot(placement, [*tokens[:250], -1], "") == 200
    assert [cache.checkpoints.longest(placement.slot, n) for n in (99, 150, 400)] == [0, 100, 200]
    cache.clear(0)
    cache.wipe(placement.slot)
    assert cache.checkpoints.used_bytes == 3 * 4  # saved states keep them
    restored = cache.find_slot([*tokens[:350], -1], "", idle=[2])
    assert cache.assign_slot(restored, [*tokens[:350], -1], "") == 300
    assert [cell.token for cell in backend.cells[2]] == tokens[:300]
    assert cache.counters.hits_ram == cache.counters.hits_copy == 1


def test_checkpoints_use_half_of_the_quota_and_evict_the_least_recently_used() -> None:
    cache, _ = new_cache(ram_bytes=16, partial_reuse=False)  # enough for two checkpoints and no state
    checkpointed(cache, 0, list(range(400)), 100, 200)
    cache.checkpoints.at(0, 100)
    checkpointed(cache, 1, [7] * 200, 100)
    assert [cache.checkpoints.longest(slot, 400) for slot in (0, 1)] == [100, 100]
    assert cache.checkpoints.used_bytes == 8
    assert not new_cache(ram_bytes=7, partial_reuse=True)[0].checkpoints.is_enabled


def test_truncate_keeps_the_tokens_of_the_last_checkpoint() -> None:
    cache, backend = new_cache(partial_reuse=False)
    checkpointed(cache, 0, list(range(400)), 100, 200)
    assert [cache.truncate(0, count) for count in (400, 350, 150, 50)] == [400, 200, 100, 0]
    assert (backend.cells[0], cache.checkpoints.used_bytes) == ([], 0)
