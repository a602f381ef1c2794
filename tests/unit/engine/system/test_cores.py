"""Core sharing among workers, among the models of a worker, and with other programs. No test waits for real time."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from cellama.engine.system.core_sharing import (
    LOOK_S,
    RAISE_S,
    WARN_S,
    Claim,
    CoreSharing,
    Peer,
    SteadyThreads,
    available_beyond_others,
    fair_shares,
    num_threads,
    others_of,
)
from cellama.engine.system.processors import Processors, ProcessorTimes, cpu_quota, machine_id, read
from cellama.tasks.worker.neighbours import Neighbour, peers_of


@given(st.integers(0, 200), st.lists(st.integers(1, 64), min_size=1, max_size=12))
def test_fair_shares_are_at_least_one_and_never_more_than_wanted_or_available(total: int, wants: list[int]) -> None:
    shares = fair_shares(total, wants)
    assert all(1 <= share <= want for share, want in zip(shares, wants, strict=True))
    assert sum(shares) <= max(total, len(wants))
    if sum(wants) >= total >= len(wants):
        assert sum(shares) == total
    full = max(shares)
    assert all(share == want or share >= full - 1 for share, want in zip(shares, wants, strict=True))


def test_fair_shares_divide_unused_cores_and_give_the_remaining_core_to_the_first_peer() -> None:
    assert fair_shares(16, [16, 1, 16]) == [8, 1, 7]
    assert fair_shares(2, [2, 2, 2]) == [1, 1, 1]


@pytest.mark.parametrize(
    ("cores", "others", "left"), [(2, 0.0, 2), (2, 0.3, 2), (2, 0.4, 1), (2, 5.0, 1), (16, 0.1, 16), (16, 1.0, 15)]
)
def test_slight_cpu_use_by_other_programs_is_tolerated(cores: int, others: float, left: int) -> None:
    assert available_beyond_others(cores, others) == left


def test_all_peers_compute_the_same_division_of_cores() -> None:
    place, peers = Processors(3), [Peer(3, 1.0, goes_first=True), Peer(3, 1.0)]
    first = num_threads(place, [Peer(3, 1.0)], 0.0)
    second = num_threads(place, [Peer(3, 1.0, goes_first=True)], 0.0)
    assert (first, second) == (2, 1)
    assert num_threads(place, peers, 0.0) == 1


def test_share_of_an_idle_peer_is_available_to_other_peers() -> None:
    assert num_threads(Processors(8), [Peer(8, 0.05)], 0.0) == 8


def test_container_quota_is_shared_only_within_the_container() -> None:
    place = Processors(64, quota=4.5)
    assert place.available == 4
    assert num_threads(place, [Peer(4, 4.0)], 0.0) == 4
    assert num_threads(place, [Peer(4, 2.0, same_quota=True)], 0.0) == 2


def test_cpu_use_of_other_programs_excludes_this_process_and_its_peers() -> None:
    assert others_of(3.5, 1.0, [Peer(4, 1.5), Peer(4, 0.1)]) == 1.0
    assert others_of(1.0, 1.2, []) == 0.0


def test_number_of_threads_falls_within_a_second_and_rises_only_when_cores_stay_free() -> None:
    steady = SteadyThreads(4)
    seen = {at: steady.follow(at, 4 if at < 10 else 2) for at in (0.0, 0.5, 9.5, 10.0, 10.5, 11.0)}
    assert seen == {0.0: 4, 0.5: 4, 9.5: 4, 10.0: 4, 10.5: 4, 11.0: 2}
    assert steady.follow(13.0, 4) == 2
    assert steady.follow(13.5, 3) == 2
    assert steady.follow(13.0 + RAISE_S, 4) == 3  # the minimum of the last seconds
    assert steady.follow(13.6 + RAISE_S, 4) == 4


def test_number_of_threads_stays_low_while_another_program_starts_and_stops() -> None:
    steady = SteadyThreads(4)
    calls = [(number / 2, 3 if number % 4 == 0 else 4) for number in range(40)]
    assert {steady.follow(at, call) for at, call in calls} == {4}


class StubPart:
    """An engine that records its number of threads."""

    def __init__(self, *, is_busy: bool = True) -> None:
        self.is_busy = is_busy
        self.last_submit = 0.0
        self.threads = 0

    def use_threads(self, count: int) -> None:
        self.threads = count


class Machine:
    """A simulated machine with a process that computes, and other programs."""

    def __init__(self, cores: int, *claims: Claim) -> None:
        self.sharing = CoreSharing(lambda: claims, Processors(cores))
        self.cores = cores
        self.now = self.busy_s = self.own_s = 0.0
        self.sharing.look(0.0, ProcessorTimes(0.0, 0.0))

    def run(self, seconds: float, *, own: float, others: float) -> None:
        """Let the process and the other programs use these numbers of cores for some time."""
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self.own_s += own * LOOK_S
            self.busy_s += min(self.cores, own + others) * LOOK_S
            self.sharing.look(self.now, ProcessorTimes(self.busy_s, self.own_s))


def test_engine_yields_a_core_to_another_program_and_takes_it_back() -> None:
    engine = StubPart()
    machine = Machine(2, Claim(engine, 2))
    machine.run(10, own=2.0, others=0.0)
    assert engine.threads == 2
    machine.run(2, own=1.2, others=0.8)
    assert engine.threads == 1
    machine.run(RAISE_S - 1, own=1.0, others=0.0)
    assert engine.threads == 1
    machine.run(2, own=1.0, others=0.0)
    assert engine.threads == 2


def test_two_workers_get_equal_shares_and_the_remaining_worker_gets_all_cores() -> None:
    engine = StubPart()
    machine = Machine(16, Claim(engine, 16))
    machine.sharing.meet([Peer(16, 0.0)])  # it has just started, and its entry reports no use yet
    machine.run(2, own=8.0, others=8.0)
    assert engine.threads == 8
    machine.sharing.meet([Peer(16, 8.0)])
    machine.run(20, own=8.0, others=8.0)
    assert engine.threads == 8
    machine.sharing.meet([Peer(16, 0.0)])
    machine.run(6, own=8.0, others=0.0)
    assert engine.threads == 16


def test_models_of_one_worker_share_cores_while_both_models_are_in_use() -> None:
    first, second, idle = StubPart(), StubPart(), StubPart(is_busy=False)
    machine = Machine(4, Claim(first, 4), Claim(second, 4), Claim(idle, 4))
    machine.run(1, own=4.0, others=0.0)
    assert (first.threads, second.threads, idle.threads) == (2, 2, 1)
    second.is_busy = False
    machine.run(1, own=2.0, others=0.0)
    assert (first.threads, second.threads, idle.threads) == (4, 2, 2)


def test_part_still_counts_as_in_use_for_a_short_time_after_its_last_request() -> None:
    first, second = StubPart(), StubPart(is_busy=False)
    second.last_submit = time.time() + 60
    machine = Machine(4, Claim(first, 4), Claim(second, 4))
    machine.run(1, own=4.0, others=0.0)
    assert first.threads == 2


def test_fixed_thread_counts_are_kept_and_other_parts_share_the_remaining_cores() -> None:
    chosen, engine = StubPart(), StubPart()
    machine = Machine(4, Claim(chosen, 3, fixed=True), Claim(engine, 4))
    machine.run(1, own=4.0, others=0.0)
    assert (chosen.threads, engine.threads) == (0, 1)
    chosen.is_busy = False
    machine.run(1, own=4.0, others=0.0)
    assert engine.threads == 4


def test_sustained_cpu_use_by_other_programs_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(2, Claim(StubPart(), 2))
    with caplog.at_level(logging.WARNING):
        machine.run(WARN_S - 1, own=1.0, others=1.0)
        assert not caplog.messages
        for _ in range(3):
            machine.run(WARN_S, own=1.0, others=1.0)
            machine.run(WARN_S, own=1.0, others=0.0)
    (told,) = caplog.messages
    assert "other programs detected (used=1.0, cores=2, threads=1, wanted=2)" in told


def test_only_peers_are_considered_when_the_system_reports_no_cpu_times() -> None:
    engine = StubPart()
    sharing = CoreSharing(lambda: [Claim(engine, 4)], Processors(4))
    sharing.meet([Peer(4, 2.0)])
    for tick in range(20):
        sharing.look(tick * LOOK_S, None)
    assert engine.threads == 2


def test_report_contains_wanted_threads_and_used_cores() -> None:
    machine = Machine(4, Claim(StubPart(), 4), Claim(StubPart(is_busy=False), 1, fixed=True))
    machine.run(10, own=4.0, others=0.0)
    report = machine.sharing.report()
    assert report["machine"] == machine_id()
    assert (report["wants"], report["threads"]) == (4, 4)
    assert report["uses"] == pytest.approx(4.0, abs=0.1)


def test_core_sharing_thread_stops_when_its_owner_stops() -> None:
    sharing = CoreSharing(list, Processors(2))
    sharing.start()
    sharing.close()
    sharing.close()
    assert not sharing._thread.is_alive()


def test_cpu_times_grow_with_the_work_of_this_process() -> None:
    before = read()
    assert before is not None
    while (after := read()) is not None and after.own_s < before.own_s + 0.05:
        pass
    assert after is not None
    assert after.busy_s > before.busy_s


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "50000"}, 4.0),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quota_is_read_from_the_control_group(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    own = tmp_path / "own"
    own.write_text("0::/pod/container\n" if "cpu.max" in files else "3:cpu,cpuacct:/pod\n")
    folder = tmp_path / ("pod" if "cpu.max" in files else "cpu/pod")
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    assert cpu_quota(tmp_path, own) == quota


def test_peers_are_workers_on_the_same_machine_that_share_a_processor() -> None:
    own_host = socket.gethostname()

    def neighbour(name: str, host: str, **cores: object) -> Neighbour:
        return Neighbour(name, host, 0.0, {"processors": [0, 1], "wants": 2, "uses": 1.0, **cores})

    others = [
        neighbour("a", own_host, uses=1.5),
        neighbour("c", "container"),
        neighbour("pinned", own_host, processors=[2, 3]),
    ]
    peers = peers_of("b", {"machine": "here", "processors": [0, 1]}, others)
    assert peers == [Peer(2, 1.5, same_quota=True, goes_first=True), Peer(2, 1.0)]
