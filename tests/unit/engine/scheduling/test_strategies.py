"""Batch strategies: how the budget of a step is divided."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from cellama.engine import InvalidRequest
from cellama.engine.backend import Chunk
from cellama.engine.core.forward import micro_batches_of
from cellama.engine.scheduling.sequence import SlotWork, State
from cellama.engine.scheduling.strategies import (
    MIN_CHUNK,
    STRATEGIES,
    TILE,
    Adaptive,
    DecodeMaximal,
    Guarded,
    SlotView,
    Strategy,
    TokenAllocation,
    equal_chunks,
    make_strategy,
)

from .schedulers import Mine, new_scheduler, run_step, sequence

VIEWS = st.lists(st.tuples(st.integers(1, 200), st.booleans(), st.integers(0, 9)), min_size=1, max_size=20).map(
    lambda slots: [SlotView(i, 1 if d else pending, d, priority) for i, (pending, d, priority) in enumerate(slots)]
)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@given(views=VIEWS, budget=st.integers(20, 300), chunk_size=st.integers(1, 128))
def test_strategy_respects_the_budget_and_leaves_no_slot_idle(
    name: str, views: list[SlotView], budget: int, chunk_size: int
) -> None:
    shares = make_strategy(name).build_batch(views, budget, chunk_size, 0)
    allowed = {view.slot: min(view.num_pending, chunk_size) for view in views}
    assert len(dict(shares)) == len(shares)
    assert all(1 <= count <= allowed[slot] for slot, count in shares)
    total = sum(count for _, count in shares)
    assert total <= budget
    served = [allowed[view.slot] for view in (views if name != "adaptive" else without_waiting(views))]
    if name in ("decode_maximal", "balanced") and any(view.decoding for view in views):
        num_decoding = sum(view.decoding for view in views)
        budget = min(budget, num_decoding + (MIN_CHUNK if name == "decode_maximal" else budget // 2))
    # Equal chunks in whole tiles may leave less than a tile for each served slot.
    assert total >= min(budget, sum(served)) - len(views) * (TILE if budget > TILE else 1)


def without_waiting(views: list[SlotView]) -> list[SlotView]:
    """Return all views except bulk prompts after an interactive one, which wait until that is prefilled."""
    prompts = [view for view in views if not view.decoding]
    interactive = [place for place, view in enumerate(prompts) if view.is_interactive]
    behind = prompts[interactive[-1] + 1 :] if interactive else []
    return [view for view in views if view not in behind]


@given(views=VIEWS, budget=st.integers(20, 300), chunk_size=st.integers(1, 128))
def test_decode_maximal_strategy_includes_every_decoding_slot(
    views: list[SlotView], budget: int, chunk_size: int
) -> None:
    shares = dict(DecodeMaximal().build_batch(views, budget, chunk_size, 0))
    assert all(shares.get(view.slot) == 1 for view in views if view.decoding)


def test_strategies_divide_a_small_budget_as_documented() -> None:
    views = [SlotView(i, 1, True, 9) for i in range(8)] + [SlotView(8 + i, 500, False, 9) for i in range(2)]

    def tokens(name: str) -> tuple[int, int]:
        shares = make_strategy(name).build_batch(views, 10, 512, 0)
        return sum(c for s, c in shares if s < 8), sum(c for s, c in shares if s >= 8)

    assert tokens("decode_maximal") == (8, 2)
    assert tokens("prefill_priority") == (0, 10)
    assert tokens("balanced") == (5, 5)
    assert tokens("adaptive") == tokens("prefill_priority")
    views[0] = SlotView(0, 1, True, 3)
    assert tokens("adaptive") == tokens("decode_maximal")


def test_gaps_between_tokens_of_decoding_slots_have_the_documented_length() -> None:
    views = [SlotView(i, 1, True) for i in range(8)] + [SlotView(8 + i, 500, False) for i in range(8)]

    def tokens(name: str, views: list[SlotView]) -> int:
        return sum(count for _, count in make_strategy(name).build_batch(views, 512, 512, 0))

    assert tokens("decode_maximal", views) == 8 + MIN_CHUNK
    assert tokens("balanced", views) == 8 + 256
    assert tokens("prefill_priority", views) == 512  # no slot decodes
    for name in STRATEGIES:
        assert tokens(name, views[8:]) == 512  # there is no gap


def test_adaptive_strategy_prefills_bulk_prompts_in_short_steps_without_interactive_prompts() -> None:
    adaptive = Adaptive()
    views = [SlotView(i, 500, False, 9) for i in range(4)]

    def num_tokens() -> int:
        return sum(count for _, count in adaptive.build_batch(views, 512, 512, 0))

    assert num_tokens() == 512  # there was no interactive request
    assert not adaptive.may_yield(512)  # the duration is unknown
    adaptive.build_batch([SlotView(9, 1, True, 3)], 512, 512, 0)
    for _ in range(14):
        adaptive.observe(512, 0.75)
        adaptive.observe(1, 1.0)  # decoding measures no prefill rate
    assert num_tokens() == 2 * MIN_CHUNK
    assert [adaptive.may_yield(count) for count in (2 * MIN_CHUNK, 3 * MIN_CHUNK)] == [False, True]
    adaptive.observe(1, 6.0)
    assert num_tokens() == 512  # no interactive request for 30 s
    views = [SlotView(0, 500, False, 9), SlotView(1, 100, False, 3), *views[2:], SlotView(4, 1, True, 9)]
    shares = dict(adaptive.build_batch(views, 512, 512, 0))
    assert shares.keys() == {0, 1, 4}  # the older bulk prompt, the interactive prompt, and the decoding slot
    assert shares[1] == 100
    streams = [SlotView(0, 1, True, 3), SlotView(1, 1, True, 9), *(SlotView(2 + i, 500, False, 9) for i in range(4))]
    assert sum(count for _, count in adaptive.build_batch(streams, 512, 512, 0)) == 2 + MIN_CHUNK


def test_adaptive_strategy_prefills_rare_interactive_prompts_without_bulk_rows() -> None:
    adaptive = Adaptive()
    views = [*(SlotView(i, 1, True, 9) for i in range(8)), SlotView(8, 100, False, 3), SlotView(9, 1, True, 3)]
    assert dict(adaptive.build_batch(views, 512, 512, 0)) == {8: 100, 9: 1}
    for _ in range(20):  # more often than is affordable
        adaptive.build_batch(views, 512, 512, 0)
        adaptive.observe(101, 0.1)
    assert {8, 9} < dict(adaptive.build_batch(views, 512, 512, 0)).keys()


def test_adaptive_strategy_prefills_rare_prompts_in_short_steps_during_streams() -> None:
    adaptive = Adaptive()
    adaptive.observe(512, 1.0)
    views = [SlotView(0, 1, True, 9), SlotView(1, 500, False, 3), SlotView(2, 1, True, 3)]
    assert dict(adaptive.build_batch(views, 512, 512, 0)) == {1: MIN_CHUNK, 2: 1}


def test_micro_batches_put_longer_chunks_first_and_separate_awaited_prompts() -> None:
    holders = [sequence(priority=priority) for priority in (3, 3, 9, 3, 3)]
    for holder, admitted_at in zip(holders, (2.0, 1.0, 0.0, 0.0, 0.0), strict=True):
        holder.admitted_at = admitted_at

    def work(slot: int, count: int, *, samples: bool = True) -> SlotWork:
        return SlotWork(holders[slot], Chunk(slot, 0, [0] * count, samples))

    younger, older, bulk = work(0, MIN_CHUNK), work(1, MIN_CHUNK), work(2, MIN_CHUNK)
    part, single = work(3, MIN_CHUNK, samples=False), work(4, 1)
    works = [younger, older, bulk, part, single]
    assert micro_batches_of(works, unified=True) == [works]
    assert micro_batches_of(works, unified=False) == [[older], [younger], [bulk, part], [single]]
    assert micro_batches_of([single], unified=False) == [[single]]
    short = [work(0, 2), work(1, 2)]
    assert micro_batches_of(short, unified=False) == [short]  # one pass for both
    shorter = work(1, 3)
    assert micro_batches_of([short[0], shorter], unified=False) == [[shorter], [short[0]]]  # two passes in any case


def test_strategy_is_loaded_from_its_import_path() -> None:
    assert type(make_strategy(f"{Mine.__module__}:Mine")).__name__ == "Mine"
    for path, message in {
        "nowhere.module:X": "can't be created: No module",
        f"{__name__}:Nothing": "has no attribute 'Nothing'",
        f"{__name__}:State": "can't be created",
        "builtins:dict": "is not a Strategy; use a subclass",
        "decode_maximum": "did you mean 'decode_maximal'",
    }.items():
        with pytest.raises(InvalidRequest, match=message):
            make_strategy(path)


class Sometimes(Strategy):
    """A strategy that fails while `error` is set."""

    error: Exception | None = None

    def build_batch(
        self, slots: list[SlotView], budget: int, chunk_size: int, queue_depth: int
    ) -> list[TokenAllocation]:
        if self.error is not None:
            raise self.error
        return [(slots[0].slot, 1)]


def test_failing_strategy_is_replaced_for_one_step_and_logged_with_decreasing_frequency(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, views = Sometimes(), [SlotView(0, 20, False)]
    guarded = Guarded(own)

    def num_tokens() -> int:
        return sum(count for _, count in guarded.build_batch(views, 512, 512, 0))

    assert num_tokens() == 1
    own.error = KeyError("a bug")
    assert {num_tokens() for _ in range(100)} == {20}
    assert guarded.num_failures == 100
    assert len(caplog.records) == 7  # 1, 2, 4, … 64
    own.error = None
    assert num_tokens() == 1


@pytest.mark.parametrize("method", ["build_batch", "observe", "may_yield"])
def test_default_strategy_that_fails_is_replaced_for_one_step(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    default = Adaptive()
    guarded, views = Guarded(default), [SlotView(0, 20, False)]

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(default, method, fail)
    assert guarded.build_batch(views, 512, 512, 0) == [(0, 20)]
    guarded.observe(20, 0.1)
    assert not guarded.may_yield(20)
    assert guarded.num_failures == 1


def test_equal_chunks_strategy_creates_equal_chunks_when_the_budget_suffices() -> None:
    views = [SlotView(i, 1000, False) for i in range(4)]
    assert equal_chunks(views, 512, 512) == [(0, 128), (1, 128), (2, 128), (3, 128)]


def test_equal_chunks_strategy_serves_the_first_slots_when_the_budget_is_too_small() -> None:
    views = [SlotView(i, 1000, False) for i in range(8)]
    assert equal_chunks(views, 2 * MIN_CHUNK, 512) == [(0, MIN_CHUNK), (1, MIN_CHUNK)]


@pytest.mark.parametrize(("left", "last"), [(4, []), (63, []), (64, [(4, 64)]), (100, [(4, 64)])])
def test_remaining_budget_is_not_spent_on_a_tiny_part_of_a_long_prompt(left: int, last: list[TokenAllocation]) -> None:
    lengths = [100, 100, 100, 212 - left, 500]
    chunks = equal_chunks([SlotView(i, length, False) for i, length in enumerate(lengths)], 512, 512)
    assert chunks == [*enumerate(lengths[:4]), *last]


def test_remaining_budget_finishes_a_short_prompt() -> None:
    lengths = [100, 100, 100, 180, 20]
    assert equal_chunks([SlotView(i, n, False) for i, n in enumerate(lengths)], 512, 512) == list(enumerate(lengths))


@pytest.mark.parametrize("name", [*sorted(STRATEGIES), "mine"])
def test_no_slot_starves_under_any_strategy(name: str) -> None:
    strategy = Mine() if name == "mine" else make_strategy(name)
    scheduler = new_scheduler(strategy)
    waiting = [sequence(1 + i % 30, priority=i % 10) for i in range(12)]
    for new in waiting:
        scheduler.enqueue(new, 0)
    for _ in range(12 * 40):
        run_step(scheduler)
    assert all(s.state is State.FINISHED for s in waiting)
