"""Tuning: the search over setups, and the results that are kept. Nothing here loads a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cellama.engine import EngineOptions
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama import fingerprint
from cellama.engine.models import tuned_options as tuned
from cellama.engine.models.tuned_options import Measured, Setup
from cellama.engine.tuning.search import Bounds, Search, choose, thread_counts

CONDITIONS = {"cpu": "a CPU", "cores": 4, "gpus": [], "llama_cpp": "1"}
SETUP = Setup(threads=2, n_parallel=16, kv_layout="partitioned", n_ubatch=256)


class Bench:
    """Measures setups by a formula; every measurement takes `seconds` of its own clock."""

    def __init__(self, rate: Callable[[Setup], float], seconds: float = 1.0) -> None:
        self.now = 0.0
        self._rate = rate
        self._seconds = seconds

    def measure(self, setup: Setup) -> Measured | None:
        self.now += self._seconds
        rate = self._rate(setup)
        return Measured(setup, rate, 1.0, self._seconds) if rate else None

    def search(self, deadline: float = 1000.0, **bounds: int) -> Search:
        return Search(self.measure, Bounds(**{"threads": 8, **bounds}), deadline, lambda: self.now)


def hills(setup: Setup) -> float:
    """Best with 4 threads, 32 slots, unified, 256 tokens per pass."""
    slots = setup.n_parallel or 1
    layout = 1.1 if setup.kv_layout == "unified" else 1.0
    passes = 1.2 if setup.n_ubatch == 256 else 1.0
    return 100 * layout * passes / (1 + abs(setup.threads - 4) / 4) / (1 + abs(slots - 32) / 32)


def test_search_finds_the_best_of_every_choice() -> None:
    chosen = Bench(hills).search().run()
    assert chosen is not None
    assert chosen.setup == Setup(threads=4, n_parallel=32, kv_layout="unified", n_ubatch=256)


def test_search_goes_down_when_more_slots_gain_nothing() -> None:
    chosen = Bench(lambda setup: 100.0 if (setup.n_parallel or 0) >= 2 else 50.0).search().run()
    assert chosen is not None
    assert chosen.setup.n_parallel == 2
    assert chosen.setup.threads == 1


def test_search_stays_within_its_bounds() -> None:
    search = Bench(lambda setup: setup.threads * (setup.n_parallel or 1) * 1.0).search(threads=3, slots=12)
    chosen = search.run()
    assert chosen is not None
    assert (chosen.setup.threads, chosen.setup.n_parallel) == (3, 8)
    assert max(row.setup.n_parallel or 0 for row in search.rows) <= 12


def test_search_begins_nothing_that_would_not_end_in_time() -> None:
    bench = Bench(hills, seconds=10.0)
    search = bench.search(deadline=45.0)
    chosen = search.run()
    assert bench.now <= 45.0
    assert len(search.rows) >= 3
    assert search.num_skipped > 0
    assert chosen == choose(search.rows)


def test_search_measures_twice_what_was_disturbed() -> None:
    disturbed = {Setup(threads=8, n_parallel=16, kv_layout="partitioned", n_ubatch=512)}

    def rate(setup: Setup) -> float:
        slow = setup in disturbed
        disturbed.discard(setup)
        return (1.0 if slow else 10.0) * (setup.n_parallel or 1) * setup.threads

    search = Bench(rate).search(slots=16)
    chosen = search.run()
    assert chosen is not None
    assert (chosen.setup.n_parallel, chosen.setup.kv_layout) == (16, "partitioned")
    assert len({row.setup for row in search.rows}) == len(search.rows)


def test_search_does_not_doubt_that_fewer_threads_are_slower() -> None:
    bench = Bench(lambda setup: 100.0 * setup.threads)
    search = bench.search(threads=2, slots=8)
    search.run()
    assert bench.now == len(search.rows)  # each took a second, once


def test_search_passes_over_what_can_not_be_measured() -> None:
    """As with slots whose cells don't fit into memory."""
    chosen = Bench(lambda setup: 0.0 if (setup.n_parallel or 0) > 8 else hills(setup)).search().run()
    assert chosen is not None
    assert chosen.setup.n_parallel == 8
    assert Bench(lambda setup: 0.0).search().run() is None


def test_search_of_an_embedding_model_tries_only_threads() -> None:
    bench = Bench(lambda setup: 100.0 / setup.threads)
    search = Search(bench.measure, Bounds(threads=4, generates=False), 1000.0, lambda: bench.now)
    chosen = search.run()
    assert chosen is not None
    assert chosen.setup == Setup(threads=1)
    assert {row.setup for row in search.rows} == {Setup(threads=count) for count in (4, 3, 2, 1)}


def test_choice_prefers_fewer_slots_then_fewer_threads_within_two_percent() -> None:
    rates = {(16, 4): 100.0, (8, 4): 98.5, (8, 2): 98.1, (4, 1): 97.9}
    rows = [Measured(replace(SETUP, n_parallel=s, threads=t), rate, 1.0, 1.0) for (s, t), rate in rates.items()]
    chosen = choose(rows)
    assert chosen is not None
    assert (chosen.setup.n_parallel, chosen.setup.threads) == (8, 2)
    assert choose([]) is None


def test_thread_counts_go_from_all_to_one() -> None:
    assert [thread_counts(most) for most in (1, 2, 6, 16)] == [[1], [2, 1], [6, 4, 3, 1], [16, 12, 8, 6, 4, 3, 2, 1]]


@pytest.fixture
def kept_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of this test's results."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cellama" / "tuned"


def keep(setup: Setup, name: str = "abc", **changed: object) -> Path:
    row = Measured(setup, 100.0, 1.0, 1.0)
    return tuned.keep(name, {**CONDITIONS, **changed}, row, [row])


def test_kept_result_is_recalled_for_its_model_and_machine_only(kept_in: Path) -> None:
    keep(SETUP)
    path = keep(replace(SETUP, threads=1), cores=1)
    assert path.parent == kept_in
    assert [file.name for file in kept_in.iterdir()] == ["abc.json"]
    assert tuned.recall("abc", CONDITIONS) == SETUP
    assert tuned.recall("abc", {**CONDITIONS, "cores": 1}) == replace(SETUP, threads=1)
    assert tuned.recall("abc", {**CONDITIONS, "llama_cpp": "2"}) is None
    assert tuned.recall("another", CONDITIONS) is None


def test_kept_result_takes_the_place_of_an_earlier_one(kept_in: Path) -> None:
    keep(SETUP)
    path = keep(replace(SETUP, n_parallel=4))
    assert tuned.recall("abc", CONDITIONS) == replace(SETUP, n_parallel=4)
    assert len(json.loads(path.read_text())["results"]) == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 0, "results": []}',
        '{"version": 1}',
        '{"version": 1, "results": [3]}',
        '{"version": 1, "results": [{"conditions": CONDITIONS}]}',
        '{"version": 1, "results": [{"conditions": CONDITIONS, "chosen": {"threads": 0, "n_parallel": 8, '
        '"kv_layout": "unified", "n_ubatch": 1}}]}',
    ],
)
def test_damaged_result_is_ignored_with_a_line_in_the_log(
    kept_in: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    path = keep(SETUP)
    path.write_text(content.replace("CONDITIONS", json.dumps(CONDITIONS)))
    with caplog.at_level(logging.WARNING):
        assert tuned.recall("abc", CONDITIONS) is None
    assert str(path) in caplog.text
    keep(SETUP)  # which takes its place
    assert tuned.recall("abc", CONDITIONS) == SETUP


def keep_for_tiny(options: EngineOptions) -> None:
    row = Measured(SETUP, 100.0, 1.0, 1.0)
    tuned.keep(fingerprint(TINY_PATH), tuned.conditions(options), row, [row])


def test_options_left_open_are_the_tuned_ones(kept_in: Path) -> None:
    assert tuned.apply(EngineOptions(), TINY_PATH) == (EngineOptions(), ())
    keep_for_tiny(EngineOptions())
    options, names = tuned.apply(EngineOptions(), TINY_PATH)
    assert options == EngineOptions(n_parallel=16, threads=2, n_ubatch=256, kv_layout="partitioned")
    assert set(names) == {"n_parallel", "threads", "n_ubatch", "kv_layout"}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (EngineOptions(threads=1), {"n_parallel", "n_ubatch", "kv_layout"}),
        (EngineOptions(n_parallel=2), {"threads", "n_ubatch"}),  # a layout suits a number of slots
        (EngineOptions(n_ctx=4096), {"threads", "n_ubatch"}),  # the context of each slot would change
        (EngineOptions(n_batch=8), {"threads", "n_ubatch"}),  # 16 slots need 16 tokens
        (EngineOptions(n_ubatch=8), {"threads"}),  # of one pass
        (EngineOptions(n_parallel=8, chunk_size=512), {"threads"}),  # chunks need a pass of 512
        (EngineOptions(n_parallel=250, n_batch=256), {"threads", "n_ubatch"}),
        (EngineOptions(n_gpu_layers=0), set()),  # other conditions
        (EngineOptions(kv_layout="unified"), {"n_parallel", "threads", "n_ubatch"}),
        (EngineOptions(n_parallel=8, threads=1, n_ubatch=512), set()),
    ],
)
def test_options_that_somebody_chose_stay(kept_in: Path, given: EngineOptions, taken: set[str]) -> None:
    keep_for_tiny(EngineOptions())
    options, names = tuned.apply(given, TINY_PATH)
    assert set(names) == taken
    chosen = {name for name in ("n_parallel", "threads", "n_ubatch") if getattr(given, name) is not None}
    assert all(getattr(options, name) == getattr(given, name) for name in chosen)
