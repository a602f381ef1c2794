"""How many drafts are decoded, with simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from cellama.engine.speculation.gate import MOST_DRAFTS, Candidate, Gate

Curve = Callable[[int], float]
ROWS = {1: 6.6, 2: 17.0, 4: 21.0, 8: 26.0, 16: 29.0, 32: 58.0, 64: 100.0, 256: 400.0}  # ms; the CPU of the notes


def cpu(rows: int) -> float:
    sizes = sorted(ROWS)
    below = max(size for size in sizes if size <= rows)
    above = min((size for size in sizes if size >= rows), default=below)
    share = 0.0 if above == below else (rows - below) / (above - below)
    return (ROWS[below] + share * (ROWS[above] - ROWS[below])) / 1e3


def gpu(rows: int) -> float:
    return (5.0 + 0.005 * rows + max(0, rows - 128) * 0.04) / 1e3


class Machine:
    """Streams whose drafts are right with a known probability, on a machine with this curve."""

    def __init__(self, curve: Curve, streams: int, right: float, *, noise: float = 0.05, unified: bool = False) -> None:
        self.curve, self.streams, self.right, self.noise, self.unified = curve, streams, right, noise, unified
        self.gate = Gate(3 * max(streams, 8), unified=unified)
        self.random = Random(1)
        self.seconds = self.tokens = 0.0
        self.longest_s = 0.0
        self.switches = 0
        self.was_on = False

    def step(self) -> None:
        lengths: dict[int, int] = {}
        if not self.gate.is_resting(self.streams):
            candidates = [Candidate(slot, [self.right] * MOST_DRAFTS) for slot in range(self.streams)]
            lengths = dict(self.gate.choose(candidates, 0.15))
        self.switches += self.was_on != bool(lengths)
        self.was_on = bool(lengths)
        single = self.streams - len(lengths)
        rows = [sum(length + 1 for length in lengths.values()), single]
        spent, before = 0.0, self.tokens
        for passes in [[sum(rows)]] if self.unified else [[count] for count in rows if count]:
            seconds = self.curve(passes[0]) * self.random.uniform(1 - self.noise, 1 + self.noise)
            self.gate.observe(passes, seconds)
            spent += seconds
            self.longest_s = max(self.longest_s, seconds)
        self.seconds += spent
        self.tokens += self.streams
        for length in lengths.values():
            while length and self.random.random() < self.right:
                self.tokens, length = self.tokens + 1, length - 1
        if lengths:
            self.gate.account(int(self.tokens - before), spent)

    def gain(self, steps: int = 3000) -> float:
        """Tokens per second over those without drafts."""
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds * self.curve(self.streams) / self.streams


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("curve", [cpu, gpu])
@pytest.mark.parametrize("streams", [1, 4, 16, 64])
@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.8, 0.97])
def test_speculation_is_never_slower(curve: Curve, streams: int, right: float, unified: bool) -> None:
    assert Machine(curve, streams, right, unified=unified).gain() >= 0.985


@pytest.mark.parametrize(
    ("curve", "streams", "least"), [(cpu, 1, 2.4), (cpu, 4, 2.0), (cpu, 16, 1.0), (gpu, 1, 9.0), (gpu, 4, 5.0)]
)
def test_right_drafts_make_few_streams_faster(curve: Curve, streams: int, least: float) -> None:
    assert Machine(curve, streams, 0.97).gain() >= least


def test_no_row_goes_to_drafts_at_saturation() -> None:
    machine = Machine(lambda rows: 0.0016 * rows, 64, 0.9)
    for _ in range(100):
        machine.step()
    tokens = machine.tokens
    for _ in range(100):
        machine.step()
    assert machine.tokens - tokens <= 64 * 101.0


def test_gate_does_not_flap_where_drafts_are_worth_about_nothing() -> None:
    machine = Machine(cpu, 16, 0.83, noise=0.2)
    machine.gain(2000)
    assert machine.switches < 200


def test_gate_finds_out_when_drafts_begin_to_pay() -> None:
    machine = Machine(cpu, 1, 0.05)
    machine.gain(500)
    machine.right, machine.tokens, machine.seconds = 0.97, 0.0, 0.0
    assert machine.gain(500) > 2.0


def test_gate_finds_out_when_the_machine_has_changed() -> None:
    machine = Machine(lambda rows: 0.002 * rows, 4, 0.9)
    machine.gain(1000)
    machine.curve, machine.tokens, machine.seconds = gpu, 0.0, 0.0
    assert machine.gain(4000) > 2.0


def test_drafts_lengthen_no_call_beyond_what_is_promised() -> None:
    machine = Machine(lambda rows: 0.1 + 0.02 * rows, 1, 0.99)
    machine.gain(50)
    machine.longest_s = 0.0
    machine.gain(200)
    assert machine.longest_s < 0.2


def test_slots_without_a_draft_are_decoded_apart_and_weighed() -> None:
    gate = Gate(64, unified=False)
    for rows in (1, 2, 4, 8, 16, 32):
        for _ in range(9):
            gate.observe([rows], gpu(rows))
    candidates = [Candidate(slot, [0.95] * 15 if slot < 4 else []) for slot in range(8)]
    lengths = gate.choose(candidates, 1.0)
    assert set(lengths) == {0, 1, 2, 3}
    assert len(set(lengths.values())) == 1
    assert gate.choose([Candidate(0, []), *candidates[5:]], 1.0) == {}


@pytest.mark.parametrize("unified", [False, True])
def test_no_call_has_more_rows_than_there_are_logits_for(unified: bool) -> None:
    random, gate = Random(2), Gate(20, unified=unified)
    for _ in range(2000):
        if gate.is_resting(4):
            continue
        candidates = [Candidate(slot, [random.random()] * random.choice([0, 3, 15])) for slot in range(4)]
        lengths = gate.choose(candidates, 1.0)
        rows = 4 + sum(lengths.values())
        assert rows <= 20
        gate.observe([rows], gpu(rows))
        if lengths:
            gate.account(rows, gpu(rows))
