"""The choice of on-demand models to load and unload, in single states and in a simulation."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings, strategies as st

from cellama.engine.memory.budget import AvailableMemory, Footprint, MemoryUse
from cellama.tasks.worker.residency import (
    LoadAction,
    Residency,
    ResidentModel,
    UnloadAction,
    WaitingModel,
    bound_s,
    next_action,
)

SWAP_AFTER_S = 5.0


def footprint(num_bytes: int = 10) -> Footprint:
    return Footprint({"CPU": MemoryUse(weights_bytes=num_bytes)})


def memory(num_bytes: int) -> AvailableMemory:
    return AvailableMemory({"CPU": num_bytes})


def waiting(model_id: str, since: float = 0.0, *, is_elsewhere: bool = False) -> WaitingModel:
    return WaitingModel(model_id, footprint(), load_s=1.0, waiting_since=since, is_elsewhere=is_elsewhere)


def resident(model_id: str, idle_since: float | None = 0.0, rate: float = 0.0) -> ResidentModel:
    return ResidentModel(model_id, footprint(), load_s=1.0, loaded_at=-100.0, idle_since=idle_since, rate=rate)


def state(*residents: ResidentModel, models: list[WaitingModel], now: float = 1.0, free: int = 0) -> Residency:
    return Residency(
        now=now,
        waiting=models,
        residents=residents,
        available=memory(free),
        max_available=memory(free + sum(each.footprint.total_bytes for each in residents if not each.is_pinned)),
        swap_after_s=SWAP_AFTER_S,
    )


def test_next_action_loads_a_model_at_once_when_it_fits() -> None:
    assert next_action(state(models=[waiting("a")], free=10)) == LoadAction("a")


def test_next_action_evicts_the_idle_model_that_is_cheapest_to_reload() -> None:
    residents = [resident("often", rate=1.0), resident("rarely", rate=0.1), resident("busy", None)]
    action = next_action(state(*residents, models=[waiting("a")]))
    assert isinstance(action, LoadAction)
    assert action.victims == ("rarely",)
    assert not action.stops_jobs


def test_next_action_evicts_the_least_recently_used_model_when_rates_are_equal() -> None:
    action = next_action(state(resident("new", 0.9), resident("old", 0.1), models=[waiting("a")]))
    assert isinstance(action, LoadAction)
    assert action.victims == ("old",)


def test_next_action_stops_a_busy_model_only_after_the_bound() -> None:
    busy = resident("busy", None)
    assert next_action(state(busy, models=[waiting("a")], now=SWAP_AFTER_S - 0.1)) is None
    action = next_action(state(busy, models=[waiting("a")], now=SWAP_AFTER_S))
    assert isinstance(action, LoadAction)
    assert action.victims == ("busy",)
    assert action.stops_jobs


@pytest.mark.parametrize("change", [{"is_pinned": True}, {"loaded_at": SWAP_AFTER_S - 0.5}])
def test_next_action_never_stops_a_pinned_or_new_model(change: dict[str, float]) -> None:
    kept = replace(resident("kept", None), **change)
    found = replace(state(kept, models=[waiting("a")], now=SWAP_AFTER_S), max_available=memory(10))
    assert next_action(found) is None


def test_next_action_loads_the_model_whose_jobs_wait_longest_relative_to_its_bound() -> None:
    slow = replace(waiting("slow"), load_s=10.0)
    action = next_action(state(models=[slow, waiting("fast", 1.0)], now=3.0, free=10))
    assert isinstance(action, LoadAction)
    assert action.model_id == "fast"


def test_next_action_leaves_a_model_to_another_worker_until_its_bound() -> None:
    models = [waiting("a", is_elsewhere=True)]
    assert next_action(state(models=models, free=10)) is None
    assert next_action(state(models=models, free=10, now=SWAP_AFTER_S)) == LoadAction("a")
    assert next_action(state(resident("busy", None), models=models, now=SWAP_AFTER_S)) is None


def test_next_action_loads_a_model_that_never_fits_so_that_the_failure_is_reported() -> None:
    large = replace(waiting("large"), footprint=footprint(100))
    assert next_action(state(resident("idle"), models=[large])) == LoadAction("large")


def test_next_action_unloads_an_idle_model_after_its_keep_alive_time() -> None:
    idle = replace(resident("idle", 1.0), keep_alive_s=2.0)
    assert next_action(state(idle, models=[], now=2.9)) is None
    assert next_action(state(idle, models=[], now=3.0)) == UnloadAction("idle")
    assert next_action(state(replace(idle, keep_alive_s=-1), models=[], now=1e6)) is None


# A worker in virtual time

STEP_S, LOAD_S, JOB_S, NUM_SLOTS, HALF_S = 0.05, 0.3, 0.1, 4, 600.0
NUM_MODELS, NUM_FIT = 20, 3


@dataclass
class SimulatedModel:
    """A resident model with the ends of its running jobs."""

    loaded_at: float
    busy_at: float
    ends: list[float] = field(default_factory=list)


@dataclass
class SimulatedWorker:
    """A worker with memory for `NUM_FIT` models."""

    pinned: frozenset[str] = frozenset()
    now: float = 0.0
    num_loads: int = 0
    waiting: dict[str, deque[float]] = field(default_factory=dict)
    models: dict[str, SimulatedModel] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=dict)  # until the model was loaded, relative to the bound
    loading: tuple[LoadAction, float | None] | None = None

    def add(self, model_id: str, at: float) -> None:
        self.waiting.setdefault(model_id, deque()).append(at)
        self.rates[model_id] = self.rates.get(model_id, 0.0) + 1 / HALF_S

    def step(self) -> None:
        self.now += STEP_S
        self._continue_load()
        stopped = set(self.loading[0].victims) if self.loading else set()
        for model_id, model in self.models.items():
            model.ends = [end for end in model.ends if end > self.now]
            queue = self.waiting.get(model_id)
            while queue and len(model.ends) < NUM_SLOTS and model_id not in stopped:
                self.waits.setdefault(model_id, []).append((self.now - queue.popleft()) / SWAP_AFTER_S)
                model.ends.append(self.now + JOB_S)
            if model.ends or queue:
                model.busy_at = self.now
        if self.loading is None:
            action = next_action(self._state())
            if isinstance(action, LoadAction):
                assert not self.pinned.intersection(action.victims)
                self.loading, self.num_loads = (action, None), self.num_loads + 1

    def _continue_load(self) -> None:
        if self.loading is None:
            return
        action, ready_at = self.loading
        if ready_at is None and not any(self.models[victim].ends for victim in action.victims):
            for victim in action.victims:
                del self.models[victim]
            self.loading = (action, self.now + LOAD_S)
        elif ready_at is not None and self.now >= ready_at:
            self.models[action.model_id] = SimulatedModel(self.now, self.now)
            self.loading = None
        assert len(self.models) <= NUM_FIT

    def _state(self) -> Residency:
        residents = [
            ResidentModel(
                id=model_id,
                footprint=footprint(),
                load_s=LOAD_S,
                loaded_at=model.loaded_at,
                idle_since=None if model.busy_at >= self.now else model.busy_at,
                rate=self.rates.get(model_id, 0.0),
                is_pinned=model_id in self.pinned,
            )
            for model_id, model in self.models.items()
        ]
        models = [
            replace(waiting(model_id, queue[0]), load_s=LOAD_S)
            for model_id, queue in self.waiting.items()
            if queue and model_id not in self.models
        ]
        return state(*residents, models=models, now=self.now, free=10 * (NUM_FIT - len(self.models)))


def simulate(worker: SimulatedWorker, arrivals: list[tuple[float, str]]) -> None:
    pending = deque(arrivals)
    while pending or any(worker.waiting.values()) or worker.loading:
        while pending and pending[0][0] <= worker.now:
            worker.add(*reversed(pending.popleft()))  # type: ignore[arg-type]
        worker.step()


def zipf_arrivals(seed: int, rate: float, num_jobs: int) -> list[tuple[float, str]]:
    random_, at, arrivals = random.Random(seed), 0.0, []
    for _ in range(num_jobs):
        at += random_.expovariate(rate)
        (number,) = random_.choices(range(NUM_MODELS), [1 / (rank + 1) for rank in range(NUM_MODELS)])
        arrivals.append((at, f"m{number}"))
    return arrivals


def fewest_loads(sequence: list[str]) -> int:
    """Return the loads of an offline optimum (Belady), which evicts the model whose next use is furthest away."""
    next_use, later = [0] * len(sequence), dict[str, int]()
    for index in range(len(sequence) - 1, -1, -1):
        next_use[index] = later.get(sequence[index], len(sequence))
        later[sequence[index]] = index
    models: dict[str, int] = {}
    num_loads = 0
    for index, model_id in enumerate(sequence):
        if model_id not in models:
            num_loads += 1
            if len(models) == NUM_FIT:
                del models[max(models, key=lambda each: models[each])]
        models[model_id] = next_use[index]
    return num_loads


@pytest.mark.parametrize("rate", [0.5, 2.0, 4.0])
def test_loads_stay_close_to_an_offline_optimum(rate: float) -> None:
    for seed in range(3):
        worker, arrivals = SimulatedWorker(), zipf_arrivals(seed, rate, 500)
        simulate(worker, arrivals)
        assert worker.num_loads <= 1.3 * fewest_loads([model_id for _, model_id in arrivals])


@given(seed=st.integers(0, 2**32), rate=st.floats(0.2, 5.0), num_pinned=st.integers(0, 1))
@settings(max_examples=25, deadline=None)
def test_no_model_waits_longer_than_twice_its_bound(seed: int, rate: float, num_pinned: int) -> None:
    assert bound_s(LOAD_S, SWAP_AFTER_S) == SWAP_AFTER_S
    worker = SimulatedWorker(pinned=frozenset({"m0"} if num_pinned else ()))
    arrivals = zipf_arrivals(seed, rate, 150)
    simulate(worker, arrivals)
    assert max(wait for waits in worker.waits.values() for wait in waits) <= 2
    assert sum(map(len, worker.waits.values())) == len(arrivals)
