"""Arrivals measured with a fake server, and the ratios that follow."""

from __future__ import annotations

import asyncio

import pytest

from cellama.bench.benchmarks.load import arrivals as arrivals_module
from cellama.bench.benchmarks.load.arrivals import ALONE, BESIDE, OURS, SERVER, Arrivals, Phase, StreamTimes, measure
from cellama.bench.benchmarks.load.mixed import compare
from cellama.bench.harness.mixed_load import LoadShape
from cellama.bench.harness.workloads import Line


class Fake:
    """Replies at once with three pieces of text. Bulk requests end in the next iteration of the event loop."""

    name = OURS
    num_bulk = 4

    def __init__(self) -> None:
        self.asked: list[Line] = []
        self.num_bulk_done = 0
        self.bulk_before: list[int] = []  # number of finished bulk requests when each request started

    async def stream(self, reading: StreamTimes) -> None:
        self.asked.append(reading.line)
        self.bulk_before.append(self.num_bulk_done)
        for _ in range(3):
            reading.note()

    async def bulk(self, line: Line) -> None:
        await asyncio.sleep(0)
        self.num_bulk_done += 1

    async def settle(self) -> None:
        pass


def test_each_rate_is_measured_alone_and_then_alongside_bulk_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals_module, "THINK_S", 0.0)
    side = Fake()
    phases = asyncio.run(measure(side, Arrivals([1e6, 2e6], LoadShape(4, num_chats=2, turns=2, scale=0.1))))
    assert [(phase.load, phase.rate) for phase in phases] == [
        (load, rate) for load in (ALONE, BESIDE) for rate in (1e6, 2e6)
    ]
    assert len(side.asked) == len({line.prompt for line in side.asked}) == 16  # no two phases share a request
    first = [line.custom_id for line in side.asked[:4] if line.custom_id.startswith("chat-0")]
    assert first == ["chat-0-0", "chat-0-1"]
    assert side.bulk_before[:8] == [0] * 8
    assert min(side.bulk_before[8:]) >= side.num_bulk
    assert [phase.bulk_rate > 0 for phase in phases[:2]] == [False, False]


def reading(*pieces_s: float) -> StreamTimes:
    return StreamTimes(Line("a", (1, 2), len(pieces_s)), pieces_s=list(pieces_s))


def test_arrival_ratios_compare_times_and_bulk_rates() -> None:
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
