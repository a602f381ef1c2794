"""Arrivals at a side that is none, and what is made of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence

import pytest

from cellama.bench.benchmarks.load import arrivals as arrivals_module
from cellama.bench.benchmarks.load.arrivals import ALONE, BESIDE, Arrivals, Phase, measure
from cellama.bench.benchmarks.load.first_token import NUM_SLOWEST, slowest, steps
from cellama.bench.benchmarks.load.mixed import compare
from cellama.bench.benchmarks.load.sides import OURS, SERVER, Reading
from cellama.bench.harness.mixed_load import Conversation
from cellama.bench.harness.workloads import Line


class Fake:
    """Answers at once with three pieces; bulk requests end when the loop comes round to them."""

    name = OURS
    num_bulk = 4

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.num_bulk_done = 0
        self.bulk_before: list[int] = []  # bulk requests that had ended when a request began

    async def stream(self, reading: Reading) -> None:
        self.asked.append(reading.line.custom_id)
        self.bulk_before.append(self.num_bulk_done)
        for _ in range(3):
            reading.note()

    async def bulk(self, line: Line) -> None:
        await asyncio.sleep(0)
        self.num_bulk_done += 1

    async def settle(self) -> None:
        self.asked.append("settled")


def of_phase(seed: int) -> Sequence[Conversation]:
    return [tuple(Line(f"{seed}.{chat}.{turn}", (1, 2), 3) for turn in range(2)) for chat in range(2)]


def bulk_lines(seed: int) -> Iterator[Line]:
    return (Line(f"bulk{number}", (1,), 5) for number in itertools.count(seed))


def test_every_rate_comes_alone_and_then_beside_a_bulk_load_in_full_swing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "THINK_S", 0.0)
    side = Fake()
    phases = asyncio.run(measure(side, Arrivals([1e6, 2e6], of_phase, bulk_lines)))
    assert [(phase.load, phase.rate) for phase in phases] == [
        (load, rate) for load in (ALONE, BESIDE) for rate in (1e6, 2e6)
    ]
    ids = [name for name in side.asked if name != "settled"]
    assert len(ids) == len(set(ids)) == 16  # no phase has what another had
    turns = [name for name in ids if name.startswith("1.0.")]
    assert turns == ["1.0.0", "1.0.1"]
    assert side.bulk_before[:8] == [0] * 8
    assert min(side.bulk_before[8:]) >= side.num_bulk
    assert [phase.bulk_rate > 0 for phase in phases[:2]] == [False, False]


def reading(*pieces_s: float, **timings: float) -> Reading:
    return Reading(Line("a", (1, 2), len(pieces_s)), sent_s=0.002, pieces_s=list(pieces_s), timings=timings)


SAID = {"delivery_ms": 10.0, "prefix_wait_ms": 20.0, "queue_ms": 50.0, "ttft_ms": 90.0}


def test_steps_of_a_first_token_come_to_the_whole() -> None:
    found = steps(reading(0.1, **SAID))
    assert found.pop("first token ms") == pytest.approx(100)
    assert list(found) == ["sending", "queue", "prefix", "admission", "reading", "publishing"]
    assert list(found.values()) == pytest.approx([2, 10, 20, 20, 40, 8])


def test_the_slowest_first_tokens_come_first_under_each_load() -> None:
    readings = [reading(number / 10, **SAID) for number in range(1, 15)]
    phases = [Phase(OURS, load, 2.0, readings) for load in (ALONE, BESIDE)]
    rows = list(slowest(phases))
    assert [row["load"] for row in rows] == [ALONE] * NUM_SLOWEST + [BESIDE] * NUM_SLOWEST
    assert rows[0]["first token ms"] == pytest.approx(1400)
    assert rows[NUM_SLOWEST - 1]["first token ms"] == pytest.approx(500)


def test_ratios_of_arrivals_are_of_times_and_of_bulk_rates() -> None:
    phases = [
        Phase(who, load, 2.0, [reading(first, first + gap)], bulk)
        for who, first, gap, bulk in ((OURS, 0.1, 0.01, 300.0), (SERVER, 0.2, 0.04, 200.0))
        for load in (ALONE, BESIDE)
    ]
    ratios, targets = compare(phases)
    assert ratios["alone, 2/s: ttft p50, ours over llama-server's"] == pytest.approx(0.5)
    assert ratios["beside bulk, 2/s: gap p99, ours over llama-server's"] == pytest.approx(0.25)
    assert ratios["beside bulk, 2/s: bulk rate, ours over llama-server's"] == pytest.approx(1.5)
    assert targets["alone, 2/s: gap p95, ours over llama-server's"] == "<= 1.0"
    assert targets["beside bulk, 2/s: gap p95, ours over llama-server's"] == "<= 0.9"
    assert ratios.keys() == targets.keys()
