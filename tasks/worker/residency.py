"""Decide which on-demand models a worker loads, and which models it unloads (docs/adr/029-models-on-demand.md).

The functions are pure. `OnDemandModels` (on_demand.py) collects their arguments and starts the actions.

A model that fits into the free memory is loaded at once. Otherwise, idle models are evicted, starting with the models
whose eviction is expected to cost the least load time per byte. If all other models have jobs, the model is loaded once
its oldest job has waited for `bound_s`. The worker then stops a busy model, which finishes its running jobs first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cellama.engine.memory.budget import AvailableMemory, Footprint

# Smallest ratio of a bound to a load time. While models replace each other, loads take at most a fifth of the time.
LOADS_PER_BOUND = 4
RELOAD_WITHIN_S = 60.0  # seconds; a victim that no job needs within a minute costs nothing


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model that is not resident and has waiting jobs. Times are in seconds."""

    id: str
    footprint: Footprint
    load_s: float  # expected load time
    waiting_since: float  # submission time of its oldest waiting job
    is_elsewhere: bool = False  # whether another worker has the model, or is loading it


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """An on-demand model that accepts jobs. Times are in seconds."""

    id: str
    footprint: Footprint
    load_s: float  # expected time to reload it
    loaded_at: float
    idle_since: float | None  # None while it has running or waiting jobs
    rate: float = 0.0  # recent jobs per second
    keep_alive_s: float = -1  # idle time after which it is unloaded; -1 disables this
    is_pinned: bool = False

    @property
    def reload_cost(self) -> float:
        """The expected load time per second that evicting this model costs for each of its bytes."""
        return self.rate * self.load_s / max(1, self.footprint.total_bytes)


@dataclass(frozen=True, slots=True)
class Residency:
    """The models of a worker and its memory, at the time `now`.

    `max_available` is the memory that would be available without any on-demand models, except pinned models.
    """

    now: float
    waiting: Sequence[WaitingModel]
    residents: Sequence[ResidentModel]
    available: AvailableMemory
    max_available: AvailableMemory
    swap_after_s: float


@dataclass(frozen=True, slots=True)
class LoadAction:
    """Load a model after unloading the victims.

    `reload_s` is the expected time for reloading the victims in the next minute. If `stops_jobs` is true, a victim has
    waiting or running jobs.
    """

    model_id: str
    victims: tuple[str, ...] = ()
    reload_s: float = 0.0
    stops_jobs: bool = False


@dataclass(frozen=True, slots=True)
class UnloadAction:
    """Unload a model that has been idle for its `keep_alive_s`."""

    model_id: str


def bound_s(load_s: float, swap_after_s: float) -> float:
    """Return how long a model's jobs wait before a busy model is stopped for them, in seconds."""
    return max(swap_after_s, LOADS_PER_BOUND * load_s)


def next_action(state: Residency) -> LoadAction | UnloadAction | None:
    """Return the next action, or None if the models should stay as they are.

    The model whose jobs have waited longest relative to its bound comes first.
    """

    def urgency(model: WaitingModel) -> float:
        return (state.now - model.waiting_since) / bound_s(model.load_s, state.swap_after_s)

    for model in sorted(state.waiting, key=urgency, reverse=True):
        action = _load(state, model, is_overdue=urgency(model) >= 1)
        if action is not None:
            return action
    for resident in state.residents:
        idle_since = resident.idle_since
        if idle_since is not None and 0 <= resident.keep_alive_s <= state.now - idle_since:
            return UnloadAction(resident.id)
    return None


def _load(state: Residency, model: WaitingModel, *, is_overdue: bool) -> LoadAction | None:
    if model.is_elsewhere and not is_overdue:
        return None
    if state.max_available.shortage(model.footprint) is not None:
        return LoadAction(model.id)  # the load fails, which reports the required memory
    evictable = [resident for resident in state.residents if not resident.is_pinned]
    idle = [resident for resident in evictable if resident.idle_since is not None]
    victims = choose_victims(state.available, model.footprint, _by_cost(idle))
    if victims is None and is_overdue and not model.is_elsewhere:
        stoppable = [each for each in evictable if each.idle_since is None and _has_paid_off(each, state.now)]
        victims = choose_victims(state.available, model.footprint, [*_by_cost(idle), *_by_cost(stoppable)])
    if victims is None:
        return None
    return LoadAction(
        model.id,
        victims=tuple(victim.id for victim in victims),
        reload_s=sum(victim.load_s * min(1.0, victim.rate * RELOAD_WITHIN_S) for victim in victims),
        stops_jobs=any(victim.idle_since is None for victim in victims),
    )


def _by_cost(residents: Iterable[ResidentModel]) -> list[ResidentModel]:
    return sorted(residents, key=lambda each: (each.reload_cost, each.idle_since or 0.0))


def _has_paid_off(resident: ResidentModel, now: float) -> bool:
    """Return whether a model has been resident for at least as long as it takes to load."""
    return now - resident.loaded_at >= resident.load_s


def choose_victims(
    available: AvailableMemory, footprint: Footprint, candidates: Sequence[ResidentModel]
) -> list[ResidentModel] | None:
    """Return the models to unload so that a footprint fits, or None if unloading all candidates is not enough.

    The first candidates are preferred, and no victim is unnecessary.
    """

    def fits(victims: Iterable[ResidentModel]) -> bool:
        return available.plus(victim.footprint for victim in victims).shortage(footprint) is None

    for count in range(len(candidates) + 1):
        if fits(candidates[:count]):
            victims = list(candidates[:count])
            for victim in reversed(candidates[:count]):
                others = [each for each in victims if each is not victim]
                victims = others if fits(others) else victims
            return victims
    return None
