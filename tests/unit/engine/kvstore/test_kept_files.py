"""A short run of `cellama bench kept_files`: damaged files, and writers that are killed."""

from __future__ import annotations

import pytest

from cellama.bench.benchmarks.kept.kept_damage import KINDS
from cellama.bench.benchmarks.kept.kept_files import damage_files, kill_writers
from cellama.engine.kvstore import catalog

from ....conftest import PATIENCE_S


def test_damaged_files_are_misses_and_counted_and_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "SCAN_PATIENCE_S", PATIENCE_S)  # no look gives up while files are read
    found = damage_files(300, seed=1)
    assert set(found.files) == set(KINDS)
    assert not found.wrong.total()
    assert (found.num_uncounted, found.num_good_lost) == (0, 0)


def test_folder_survives_writers_that_are_killed() -> None:
    found = kill_writers(3, seed=1)
    assert found.num_torn == 3
    assert (found.num_over, found.num_left, found.num_wrong) == (0, 0, 0)
    assert found.num_states > 0
