"""Tuning: the sweep over setups, and stored results. Nothing here loads a model."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from cellama.engine import EngineOptions
from cellama.engine.bundled import TINY_PATH
from cellama.engine.llama.gguf_files import fingerprint
from cellama.engine.models import tuned_options as tuned
from cellama.engine.models.tuned_options import Measurement, Setup
from cellama.engine.tuning.sweep import Sweep, SweepLimits, choose, thread_counts

CONDITIONS = {"cpu": "a CPU", "cores": 4, "gpus": [], "llama_cpp": "1"}
SETUP = Setup(threads=2, n_parallel=16, kv_layout="partitioned", n_ubatch=256)


class SimulatedMachine:
    """Measures setups by a formula. Every measurement takes `seconds` of its own clock."""

    def __init__(self, rate: Callable[[Setup], float], seconds: float = 1.0) -> None:
        self.now = 0.0
        self._rate = rate
        self._seconds = seconds

    def measure(self, setup: Setup) -> Measurement | None:
        self.now += self._seconds
        rate = self._rate(setup)
        return Measurement(setup, rate, 1.0, self._seconds) if rate else None

    def sweep(self, deadline: float = 1000.0, **limits: int) -> Sweep:
        return Sweep(self.measure, SweepLimits(**{"threads": 8, **limits}), deadline, lambda: self.now)


def hills(setup: Setup, threads: float = 4, slots: float = 32, unified: float = 1.1, ubatch: float = 256) -> float:
    """Return the tokens per second of a machine that is fastest with these values."""
    rate = 100 / (1 + abs(setup.threads - threads) / 4) / (1 + abs((setup.n_parallel or 1) - slots) / 32)
    return rate * (unified if setup.kv_layout == "unified" else 1.0) / (1 + abs((setup.n_ubatch or 0) - ubatch) / 1000)


def test_sweep_finds_the_best_value_of_every_option() -> None:
    chosen = SimulatedMachine(hills).sweep().run()
    assert chosen is not None
    assert chosen.setup == Setup(threads=4, n_parallel=32, kv_layout="unified", n_ubatch=256)


@pytest.mark.parametrize("seed", range(20))
def test_choice_is_within_3_percent_of_the_best_configuration_on_noisy_machines(seed: int) -> None:
    chance = random.Random(seed)
    best = {
        "threads": chance.uniform(1, 8),
        "slots": 2 ** chance.uniform(0, 6),
        "unified": chance.uniform(0.8, 1.2),
        "ubatch": 2 ** chance.uniform(6, 10),
    }
    noisy = SimulatedMachine(lambda setup: hills(setup, **best) * chance.uniform(0.995, 1.005))
    sweep = noisy.sweep()
    chosen = sweep.run()
    assert chosen is not None
    every = (Setup(*values) for values in product(*sweep.limits.values.values()))
    possible = (setup for setup in every if (setup.n_parallel or 0) <= (setup.n_ubatch or 0))
    assert hills(chosen.setup, **best) >= 0.97 * max(hills(setup, **best) for setup in possible if _is_sound(setup))
    assert len(sweep.rows) < 40


def _is_sound(setup: Setup) -> bool:
    return setup.n_parallel != 1 or setup.kv_layout == "unified"


def test_sweep_tries_fewer_slots_when_more_slots_gain_nothing() -> None:
    chosen = SimulatedMachine(lambda setup: 100.0 if (setup.n_parallel or 0) >= 2 else 50.0).sweep().run()
    assert chosen is not None
    assert (chosen.setup.n_parallel, chosen.setup.threads) == (2, 1)


def test_sweep_stays_within_its_limits() -> None:
    sweep = SimulatedMachine(lambda setup: setup.threads * (setup.n_parallel or 1) * 1.0).sweep(threads=3, slots=12)
    chosen = sweep.run()
    assert chosen is not None
    assert (chosen.setup.threads, chosen.setup.n_parallel) == (3, 8)
    assert max(row.setup.n_parallel or 0 for row in sweep.rows) <= 12


def test_sweep_starts_no_measurement_that_would_not_finish_in_time() -> None:
    machine = SimulatedMachine(hills, seconds=10.0)
    sweep = machine.sweep(deadline=45.0)
    chosen = sweep.run()
    assert machine.now <= 45.0
    assert len(sweep.rows) >= 3
    assert sweep.skipped
    assert chosen == choose(sweep.rows)


def test_sweep_repeats_a_disturbed_measurement() -> None:
    disturbed = {Setup(threads=8, n_parallel=16, kv_layout="partitioned", n_ubatch=512)}

    def rate(setup: Setup) -> float:
        slow = setup in disturbed
        disturbed.discard(setup)
        return (1.0 if slow else 10.0) * (setup.n_parallel or 1) * setup.threads

    sweep = SimulatedMachine(rate).sweep(slots=16)
    chosen = sweep.run()
    assert chosen is not None
    assert (chosen.setup.n_parallel, chosen.setup.kv_layout) == (16, "partitioned")
    assert len({row.setup for row in sweep.rows}) == len(sweep.rows)


def test_sweep_skips_configurations_that_cannot_be_measured() -> None:
    """Some setups fail, as when the cells of many slots don't fit into memory."""
    chosen = SimulatedMachine(lambda setup: 0.0 if (setup.n_parallel or 0) > 8 else hills(setup)).sweep().run()
    assert chosen is not None
    assert chosen.setup.n_parallel == 8
    assert SimulatedMachine(lambda setup: 0.0).sweep().run() is None


def test_sweep_of_an_embedding_model_varies_only_threads() -> None:
    sweep = SimulatedMachine(lambda setup: 100.0 / setup.threads).sweep(threads=4, generates=False)
    chosen = sweep.run()
    assert chosen is not None
    assert chosen.setup == Setup(threads=1)
    assert {row.setup for row in sweep.rows} == {Setup(threads=count) for count in (4, 3, 2, 1)}


def test_choice_prefers_fewer_slots_then_fewer_threads_within_two_percent() -> None:
    rates = {(16, 4): 100.0, (8, 4): 98.5, (8, 2): 98.1, (4, 1): 97.9}
    rows = [Measurement(replace(SETUP, n_parallel=s, threads=t), rate, 1.0, 1.0) for (s, t), rate in rates.items()]
    chosen = choose(rows)
    assert chosen is not None
    assert (chosen.setup.n_parallel, chosen.setup.threads) == (8, 2)
    assert choose([]) is None


def test_thread_counts_are_repeated_halves_and_their_midpoints() -> None:
    assert [thread_counts(most) for most in (1, 2, 6, 16)] == [[1], [1, 2], [1, 3, 4, 6], [1, 2, 3, 4, 6, 8, 12, 16]]


@pytest.fixture
def kept_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the directory of this test's results."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cellama" / "tuned"


def keep(setup: Setup, name: str = "abc", **changed: object) -> Path:
    return tuned.store_result(name, {**CONDITIONS, **changed}, setup)


def test_stored_result_is_used_only_for_its_model_and_machine(kept_in: Path) -> None:
    keep(SETUP)
    path = keep(replace(SETUP, threads=1), cores=1)
    assert path.parent == kept_in
    assert [file.name for file in kept_in.iterdir()] == ["abc.json"]
    assert tuned.find_result("abc", CONDITIONS) == SETUP
    assert tuned.find_result("abc", {**CONDITIONS, "cores": 1}) == replace(SETUP, threads=1)
    assert tuned.find_result("abc", {**CONDITIONS, "llama_cpp": "2"}) is None
    assert tuned.find_result("another", CONDITIONS) is None


def test_stored_result_replaces_an_earlier_result(kept_in: Path) -> None:
    keep(SETUP)
    path = keep(replace(SETUP, n_parallel=4))
    assert tuned.find_result("abc", CONDITIONS) == replace(SETUP, n_parallel=4)
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
def test_damaged_result_is_ignored_and_logged(kept_in: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    path = keep(SETUP)
    path.write_text(content.replace("CONDITIONS", json.dumps(CONDITIONS)))
    with caplog.at_level(logging.WARNING):
        assert tuned.find_result("abc", CONDITIONS) is None
    assert str(path) in caplog.text
    keep(SETUP)  # replaces the damaged one
    assert tuned.find_result("abc", CONDITIONS) == SETUP


def keep_for_tiny(options: EngineOptions) -> None:
    tuned.store_result(fingerprint(TINY_PATH), tuned.conditions(options), SETUP)


def test_unset_options_get_tuned_values(kept_in: Path) -> None:
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
        (EngineOptions(n_ubatch=8), {"threads"}),  # tokens of one pass
        (EngineOptions(n_parallel=8, chunk_size=512), {"threads"}),  # chunks need a pass of 512
        (EngineOptions(n_parallel=250, n_batch=256), {"threads", "n_ubatch"}),
        (EngineOptions(n_gpu_layers=0), set()),  # other conditions
        (EngineOptions(kv_layout="unified"), {"n_parallel", "threads", "n_ubatch"}),
        (EngineOptions(n_parallel=8, threads=1, n_ubatch=512), set()),
    ],
)
def test_explicit_options_override_tuned_values(kept_in: Path, given: EngineOptions, taken: set[str]) -> None:
    keep_for_tiny(EngineOptions())
    options, names = tuned.apply(given, TINY_PATH)
    assert set(names) == taken
    chosen = {name for name in ("n_parallel", "threads", "n_ubatch") if getattr(given, name) is not None}
    assert all(getattr(options, name) == getattr(given, name) for name in chosen)
