"""The number of drafts to decode, on simulated machines."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from cellama.engine.scheduling.decode_costs import DecodeCosts
from cellama.engine.speculation.gate import MAX_DRAFTS, Candidate, Gate

Seconds = Callable[[int], float]
ROWS = {
    1: 6.6,
    2: 17.0,
    4: 21.0,
    8: 26.0,
    16: 29.0,
    32: 58.0,
    64: 100.0,
    256: 400.0,
}  # milliseconds by rows on a CPU (ADR 015)


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

    def __init__(
        self, curve: Seconds, streams: int, right: float, *, noise: float = 0.05, unified: bool = False
    ) -> None:
        self.curve, self.streams, self.right, self.noise, self.unified = curve, streams, right, noise, unified
        self.costs = DecodeCosts()
        self.gate = Gate(self.costs, 3 * max(streams, 8), unified=unified)
        self.random = Random(1)
        self.seconds = self.tokens = 0.0
        self.longest_s = 0.0
        self.switches = 0
        self.was_on = False

    def step(self) -> None:
        lengths: dict[int, int] = {}
        if self.gate.begin_step(self.streams):
            candidates = [Candidate(slot, [self.right] * MAX_DRAFTS) for slot in range(self.streams)]
            lengths = dict(self.gate.choose(candidates, 0.15))
        self.switches += self.was_on != bool(lengths)
        self.was_on = bool(lengths)
        single = self.streams - len(lengths)
        rows = [sum(length + 1 for length in lengths.values()), single]
        spent, before = 0.0, self.tokens
        for passes in [[sum(rows)]] if self.unified else [[count] for count in rows if count]:
            seconds = self.curve(passes[0]) * self.random.uniform(1 - self.noise, 1 + self.noise)
            self.costs.observe(passes, seconds)
            self.gate.observe(seconds)
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
        """Return the tokens per second relative to those without drafts."""
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds * self.curve(self.streams) / self.streams


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize("curve", [cpu, gpu])
@pytest.mark.parametrize("streams", [1, 4, 16, 64])
@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.8, 0.97])
def test_speculation_is_never_slower(curve: Seconds, streams: int, right: float, unified: bool) -> None:
    steps = 3000 if streams < 16 else 1000  # more streams take longer
    assert Machine(curve, streams, right, unified=unified).gain(steps) >= 0.985


@pytest.mark.parametrize(
    ("curve", "streams", "least"), [(cpu, 1, 2.4), (cpu, 4, 2.0), (cpu, 16, 1.0), (gpu, 1, 9.0), (gpu, 4, 5.0)]
)
def test_correct_drafts_speed_up_a_small_number_of_streams(curve: Seconds, streams: int, least: float) -> None:
    assert Machine(curve, streams, 0.97).gain() >= least


def test_saturated_machine_decodes_few_drafts() -> None:
    machine = Machine(lambda rows: 0.0016 * rows, 64, 0.9)
    for _ in range(100):
        machine.step()
    tokens = machine.tokens
    for _ in range(100):
        machine.step()
    assert machine.tokens - tokens <= 64 * 103.0  # old measurements are repeated with one slot or a few


def test_gate_does_not_oscillate_when_drafts_hardly_pay_off() -> None:
    machine = Machine(cpu, 16, 0.83, noise=0.2)
    machine.gain(2000)
    assert machine.switches < 200


def test_gate_detects_when_drafts_start_to_pay_off() -> None:
    machine = Machine(cpu, 1, 0.05)
    machine.gain(500)
    machine.right, machine.tokens, machine.seconds = 0.97, 0.0, 0.0
    assert machine.gain(500) > 2.0


def test_gate_detects_when_the_speed_of_the_machine_has_changed() -> None:
    machine = Machine(lambda rows: 0.002 * rows, 4, 0.9)
    machine.gain(1000)
    machine.curve, machine.tokens, machine.seconds = gpu, 0.0, 0.0
    assert machine.gain(4000) > 2.0


def stalls(random: Random, seconds: float) -> float:
    """Lose the core for 4 ms in a quarter of all milliseconds."""
    return seconds + 0.004 * sum(random.random() < 0.25 for _ in range(int(seconds * 1e3)))


def varies(random: Random, seconds: float) -> float:
    """Take three times as long on average, and vary from pass to pass by a factor of two."""
    return seconds * random.lognormvariate(0.9, 0.7)


@pytest.mark.parametrize("interference", [stalls, varies])
@pytest.mark.parametrize("streams", [1, 4])
def test_drafts_speed_up_streams_while_another_process_interferes(
    interference: Callable[[Random, float], float], streams: int
) -> None:
    random = Random(3)
    machine = Machine(lambda rows: interference(random, cpu(rows)), streams, 0.97)
    for _ in range(400):
        machine.step()
    undisturbed_s = sum(interference(random, cpu(streams)) for _ in range(2000)) / 2000
    assert machine.tokens / machine.seconds * undisturbed_s / streams >= 2.2


@pytest.mark.parametrize("interference", [stalls, varies])
@pytest.mark.parametrize("streams", [1, 4])
def test_costs_learned_during_interference_do_not_stop_drafts_afterwards(
    interference: Callable[[Random, float], float], streams: int
) -> None:
    random = Random(3)
    machine = Machine(cpu, streams, 0.97)
    machine.gain(300)
    machine.curve = lambda rows: interference(random, cpu(rows))
    machine.gain(400)
    machine.curve, machine.tokens, machine.seconds = cpu, 0.0, 0.0
    assert machine.gain(300) >= 2.2


def test_drafts_do_not_lengthen_decode_calls_beyond_the_limit() -> None:
    machine = Machine(lambda rows: 0.1 + 0.02 * rows, 1, 0.99)
    machine.gain(50)
    machine.longest_s = 0.0
    machine.gain(200)
    assert machine.longest_s < 0.2


def knowing_gate(seconds: Seconds) -> Gate:
    """Return a gate for a measured machine, with room for 64 rows."""
    costs = DecodeCosts()
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64):
        for _ in range(9):
            costs.observe([rows], seconds(rows))
    return Gate(costs, 64, unified=False)


def test_slots_without_a_draft_are_decoded_separately_and_their_cost_is_considered() -> None:
    gate = knowing_gate(gpu)
    candidates = [Candidate(slot, [0.95] * 15 if slot < 4 else []) for slot in range(8)]
    gate.begin_step(8)
    lengths = gate.choose(candidates, 1.0)
    assert set(lengths) == {0, 1, 2, 3}
    assert len(set(lengths.values())) == 1
    gate.begin_step(4)
    assert gate.choose([Candidate(0, []), *candidates[5:]], 1.0) == {}


@pytest.mark.parametrize("can_pad", [True, False])
def test_slot_without_a_draft_is_padded_when_it_would_separate_other_slots(can_pad: bool) -> None:
    gate = knowing_gate(cpu)
    gate.begin_step(4)
    candidates = [Candidate(slot, [0.95] * 15 if slot != 1 else [], can_pad=can_pad) for slot in range(4)]
    assert (1 in gate.choose(candidates, 1.0)) == can_pad
    gate.begin_step(4)
    candidates[2] = Candidate(2, [], can_pad=can_pad)  # while the choice is kept
    lengths = gate.choose(candidates, 1.0)
    assert {1, 2} <= lengths.keys() if can_pad else not {1, 2} & lengths.keys()


def test_choice_of_drafts_is_kept_only_while_the_number_of_passes_is_the_same() -> None:
    gate = knowing_gate(lambda rows: 0.01 + 0.0001 * rows)  # the pass is most of the cost
    gate.begin_step(4)
    candidates = [Candidate(slot, [0.95]) for slot in range(4)]
    assert len(gate.choose(candidates, 1.0)) == 4
    gate.begin_step(4)
    assert gate.choose([*candidates[:1], Candidate(1, []), *candidates[2:]], 1.0) == {}


def test_sources_are_not_asked_again_whenever_a_request_starts_or_ends() -> None:
    gate = Gate(DecodeCosts(), 256, unified=True)
    assert gate.begin_step(32)
    gate.skip()
    assert not any(gate.begin_step(num_slots) for num_slots in (31, 32, 30, 32, 31))
    assert gate.begin_step(1)


def test_gate_crosses_a_cost_step_at_which_few_drafts_do_not_pay_off() -> None:
    machine = Machine(lambda rows: 0.010 if rows <= 4 else 0.035, 4, 0.97)  # 8 rows: 0.9 times as fast as 4; 20: 1.4
    assert machine.gain() >= 1.25


@pytest.mark.parametrize("unified", [False, True])
def test_decode_calls_never_exceed_the_maximum_number_of_rows(unified: bool) -> None:
    random, costs = Random(2), DecodeCosts()
    gate = Gate(costs, 20, unified=unified)
    for _ in range(2000):
        if not gate.begin_step(4):
            continue
        candidates = [Candidate(slot, [random.random()] * random.choice([0, 3, 15])) for slot in range(4)]
        lengths = gate.choose(candidates, 1.0)
        rows = 4 + sum(lengths.values())
        assert rows <= 20
        costs.observe([rows], gpu(rows))
        gate.observe(gpu(rows))
        if lengths:
            gate.account(rows, gpu(rows))
