"""Workloads of the comparisons with peers."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, strategies as st

from cellama.bench.harness.workloads import families, independent, num_common, read_lines, trie_optimum, write_lines


def test_families_share_only_their_prefixes() -> None:
    lines = families(50, 24, 4, shared=20, num_families=7, seed=3)
    heads = [line.prompt[:20] for line in lines]
    assert len(lines) == 50
    assert len(set(heads)) == 7
    assert {heads.count(head) for head in heads} == {7, 8}
    assert heads != sorted(heads)
    assert trie_optimum(line.prompt for line in lines) <= 7 * 20 + 50 * 4


def test_independent_lines_depend_on_the_seed_and_hardly_share_prefixes() -> None:
    lines = independent(20, 16, 4, seed=1)
    assert lines == independent(20, 16, 4, seed=1) != independent(20, 16, 4, seed=2)
    assert trie_optimum(line.prompt for line in lines) >= 20 * 16 - 10


def test_lines_round_trip(tmp_path: Path) -> None:
    lines = families(9, 8, 3, shared=5, num_families=2)
    write_lines(tmp_path / "in.jsonl", lines)
    assert list(read_lines(tmp_path / "in.jsonl")) == lines


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12))
def test_trie_optimum_counts_each_distinct_prefix_once(prompts: list[list[int]]) -> None:
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
    assert trie_optimum(prompts) == len(prefixes)


def test_num_common_stops_at_the_first_difference() -> None:
    assert num_common([1, 2, 3], [1, 2, 4, 5]) == 2
    assert num_common([], [1]) == 0
    assert num_common([1, 2], [1, 2, 3]) == 2
