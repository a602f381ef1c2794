"""A short run of `cellama bench kept_files`: damaged files, and writers that are killed."""

from __future__ import annotations

from cellama.bench.benchmarks.kept.kept_damage import KINDS
from cellama.bench.benchmarks.kept.kept_files import damage_files, kill_writers


def test_damaged_files_are_misses_and_counted_and_the_others_are_read() -> None:
    found = damage_files(300, seed=1)
    assert set(found.files) == set(KINDS)
    assert not found.wrong.total()
    assert (found.num_uncounted, found.num_good_lost) == (0, 0)


def test_folder_survives_writers_that_are_killed() -> None:
    found = kill_writers(3, seed=1)
    assert found.num_torn == 3
    assert (found.num_over, found.num_left, found.num_wrong) == (0, 0, 0)
    assert found.num_states > 0
