"""Whether a model may be loaded: plans it, compares with the budget, and has idle models unloaded if that is wanted."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cellama.engine.errors import EngineError, InsufficientMemory, InvalidRequest
from cellama.engine.memory.budget import (
    Budget,
    Device,
    Footprint,
    MemoryBudget,
    OnFull,
    Shortage,
    Vram,
    choose_victims,
    readable,
    vram_of,
)
from cellama.engine.options import Capability, EngineOptions
from cellama.engine.system.threads import at_low_priority

from .planning import plan_apart

if TYPE_CHECKING:
    from cellama.engine.llama import LoadPlan

log = logging.getLogger(__name__)


class MemoryAdmission:
    """Keeps the memory of one process's models within its budget. Safe from any thread.

    One load is planned at a time, so that two can't take the same room; loading itself goes on side by side.
    """

    def __init__(
        self,
        limit: MemoryBudget,
        on_full: OnFull,
        idle: Callable[[], Sequence[str]],
        evict: Callable[[str], None],
        num_saved: Callable[[str], int],
    ) -> None:
        """`idle` names the models that may go, the least recently used first; `evict` returns when one is gone;
        `num_saved` tells the bytes of a model's states in RAM.

        Raises InvalidRequest.
        """
        if not (limit in ("auto", "unlimited") or (isinstance(limit, int) and limit > 0)):
            raise InvalidRequest(f"memory_budget is {limit!r}; it must be auto, unlimited, or bytes above 0")
        if on_full not in get_args(OnFull):
            raise InvalidRequest(f"on_full is {on_full!r}; it must be refuse or evict")
        from cellama.engine.llama import devices

        self.on_full: OnFull = on_full
        self.evict = evict
        self._idle = idle
        self.budget = Budget(limit, devices, num_saved)
        self._turn = threading.Lock()  # of one load to be planned

    def admit(
        self, model_id: str, path: Path, options: EngineOptions, wanted: frozenset[Capability] | None
    ) -> LoadPlan:
        """Reserves what a model will take; returns its options, tuned and with the context that fits, and its uses.

        Raises InsufficientMemory, ModelLoadFailed, WrongCapability, InvalidRequest.
        """
        stubborn: set[str] = set()  # idle models that did not go
        with self._turn:
            while True:
                room = self.budget.available()
                plan = at_low_priority(functools.partial(plan_apart, model_id, path, options, wanted, room))
                shortage = None if self.budget.limit == "unlimited" else room.shortage(plan.footprint)
                if shortage is None:
                    break
                if not self._make_room(model_id, plan.footprint, stubborn):
                    raise self._refusal(model_id, plan, shortage)
            self.budget.reserve(model_id, plan.footprint)
        return plan

    def report(self) -> dict[str, Any]:
        """The budget, what it does when it is full, and the devices: for people and registries."""
        found = devices()
        vram = vram_of(found)
        return {
            "budget": self.budget.limit,
            "on_full": self.on_full,
            "devices": [asdict(device) for device in found],
            "vram": None if vram is None else asdict(vram),
        }

    def _make_room(self, model_id: str, footprint: Footprint, stubborn: set[str]) -> bool:
        """True if idle models went, so that it is worth another look."""
        if self.on_full != "evict":
            return False
        taken = self.budget.taken()
        idle = [(other, taken[other]) for other in self._idle() if other in taken and other not in stubborn]
        victims = choose_victims(self.budget.available(), footprint, idle)
        for victim in victims:
            log.info("model %s is unloaded to make room for %s", victim, model_id)
            try:
                self.evict(victim)
            except EngineError as error:
                log.warning("model %s can't make room: %s", victim, error)
                stubborn.add(victim)
        return bool(victims)

    def _refusal(self, model_id: str, plan: LoadPlan, shortage: Shortage) -> InsufficientMemory:
        device, limit = shortage.device, self.budget.limit
        others = [
            (other, size) for other, taken in self.budget.taken().items() if (size := taken.on(device).total_bytes)
        ]
        draft = ", leave out draft" if plan.options.draft else ""
        unload = _models_to_unload(others, shortage.required_bytes - shortage.available_bytes)
        return InsufficientMemory(
            f"model {model_id!r} does not fit: it needs {readable(shortage.required_bytes)} of {device} "
            f"({_in_words(plan, device)}), available are {readable(shortage.available_bytes)} "
            f"(memory_budget is {limit if isinstance(limit, str) else readable(limit)}); lower "
            "n_parallel, ctx_per_slot or cache_ram_bytes, choose q8_0 as cache_type_k and cache_type_v, raise "
            f"memory_budget{draft}{unload}",
            device=device,
            required_bytes=shortage.required_bytes,
            available_bytes=shortage.available_bytes,
        )


def _models_to_unload(others: list[tuple[str, int]], missing_bytes: int) -> str:
    """Return the end of the remedy: the smallest model that suffices, else all, or nothing if all do not."""
    enough = [other for other in others if other[1] >= missing_bytes]
    if enough:
        others = [min(enough, key=lambda other: other[1])]
    elif sum(size for _, size in others) < missing_bytes:
        return ""
    return ", or unload " + " and ".join(f"{name!r} ({readable(size)})" for name, size in others)


def _in_words(plan: LoadPlan, device: str) -> str:
    usage, context = plan.footprint.on(device), ""
    if plan.options.ctx_per_slot:
        context = f" for {plan.options.num_slots} slots of {plan.options.ctx_per_slot} tokens"
    parts = (
        *(("weights", usage.weights_bytes), ("KV cache" + context, usage.kv_bytes), ("compute", usage.compute_bytes)),
        ("saved states", usage.saved_bytes),
    )
    return ", ".join(f"{name} {readable(size)}" for name, size in parts if size)


def devices() -> list[Device]:
    """The devices that models can use, with total and free bytes; without a GPU build that is the CPU alone."""
    from cellama.engine.llama import devices

    return devices()


def vram_info() -> Vram | None:
    """Total, free and used bytes of all GPUs together; None without one, or if llama.cpp is built for the CPU only."""
    return vram_of(devices())
