"""Generated arrivals have the published shapes of the traces."""

from __future__ import annotations

import itertools
import statistics

import pytest

from cellama.bench.harness.traces import (
    BLOCK,
    azure_code,
    azure_conversation,
    conversations,
    families,
    single_requests,
    text_of,
)


def test_conversations_have_the_lengths_and_shared_blocks_given_in_the_trace() -> None:
    sessions = conversations(12_000, per_s=3.4, seed=1)
    turns = [turn for session in sessions for turn in session.turns]
    assert len(turns) == 12_000
    assert statistics.mean(turn.num_prompt for turn in turns) == pytest.approx(12_035, rel=0.1)
    assert statistics.mean(turn.num_new for turn in turns) == pytest.approx(343, rel=0.1)
    seen: set[int] = set()
    num_shared = num_blocks = 0
    for session in sessions:
        prompt: list[int] = []
        for turn in session.turns:
            prompt += turn.blocks
            num_shared += sum(1 for _ in itertools.takewhile(seen.__contains__, prompt))
            num_blocks += len(prompt)
            seen.update(prompt)
    assert num_shared / num_blocks == pytest.approx(0.366, abs=0.04)


@pytest.mark.parametrize(("lengths", "prompt", "new"), [(azure_conversation, 1020, 129), (azure_code, 1500, 13)])
def test_single_requests_have_the_published_medians(lengths, prompt: int, new: int) -> None:  # type: ignore[no-untyped-def]
    turns = [session.turns[0] for session in single_requests(lengths, 4000, 5.0, seed=2)]
    assert statistics.median(turn.num_prompt for turn in turns) == pytest.approx(prompt, rel=0.1)
    assert statistics.median(turn.num_new for turn in turns) == pytest.approx(new, rel=0.1)


def test_families_share_their_first_blocks() -> None:
    sessions = families(30, 5, 2 * BLOCK, 100, 8, seed=3)
    first = {session.turns[0].blocks[:2] for session in sessions}
    assert len(first) == 5
    assert len({block for session in sessions for block in session.turns[0].blocks}) == 5 * 2 + 30


def test_text_of_represents_each_block_by_a_repeated_number() -> None:
    assert text_of([1, 2]) == "00000001" * 256 + "00000002" * 256
