"""What a model does on this machine with one setup after the other: one load of the weights, a context for each."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cellama.engine.capabilities import Capability
from cellama.engine.errors import InsufficientMemory, InvalidRequest, ModelLoadFailed
from cellama.engine.memory.budget import Budget, readable
from cellama.engine.models import tuned_options
from cellama.engine.models.sources import HubOptions, resolve
from cellama.engine.models.tuned_options import Measured, Setup
from cellama.engine.options import DEFAULT_SLOTS, EngineOptions
from cellama.engine.system.processors import available_cores

from .bed import CONTEXT, Bed
from .search import MAX_SLOTS, Bounds, Search
from .workload import Work

if TYPE_CHECKING:
    from cellama.engine.llama import LoadPlan

log = logging.getLogger(__name__)
Measure = Callable[[Setup], Measured | None]


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of `tune`. `rows` are in the order in which they were measured."""

    fingerprint: str
    description: str
    generates: bool
    work: Work
    rows: tuple[Measured, ...]
    chosen: Measured
    num_skipped: int  # setups that there was no time for
    took_s: float
    load: float  # what other programs used of the cores before, 0 to 1 and above; 0 where the system does not tell


def tune(
    source: str,
    *,
    options: EngineOptions | None = None,
    capabilities: Iterable[Capability] | None = None,
    hub: HubOptions | None = None,
    seconds: float = 150.0,
    max_threads: int | None = None,
    max_slots: int = MAX_SLOTS,
    on_row: Callable[[Measured], None] = lambda row: None,
) -> Tuning:
    """Measures a model for about `seconds`, not counted what is fetched from the hub. Nothing is kept: see `keep`.

    Of `options` all but n_parallel, n_ubatch, threads, kv_layout and the context holds for every measurement.
    Raises ModelLoadFailed, InsufficientMemory, WrongCapability, InvalidRequest.
    """
    from cellama.engine.llama import LlamaModel

    if seconds <= 0 or max_slots < 1 or (max_threads is not None and max_threads < 1):
        raise InvalidRequest("seconds, slots and threads must be above 0")
    options = _without_choices(options or EngineOptions())
    path = resolve(source, hub or HubOptions())
    load, started = _load(), time.monotonic()
    wanted = None if capabilities is None else frozenset(capabilities)
    plan, slots = _plan(path, options, wanted, min(max_slots, MAX_SLOTS, options.n_batch))
    threads = min(max_threads or available_cores(), available_cores())
    weights = LlamaModel(path, n_gpu_layers=options.n_gpu_layers)
    try:
        bed = Bed(weights, options, plan, started, seconds)
        bounds = Bounds(threads, slots, options.n_batch, plan.uses.generates)
        search = Search(_telling(bed.measure, on_row), bounds, started + seconds)
        if plan.uses.generates:
            bed.size_work(threads, min(DEFAULT_SLOTS, slots))
        chosen = search.run()
    finally:
        weights.close()
    if chosen is None:
        raise ModelLoadFailed(f"{source!r}: nothing could be measured within {seconds:g} s; allow more")
    about = (weights.info.fingerprint, weights.info.description, plan.uses.generates, bed.work)
    return Tuning(*about, tuple(search.rows), chosen, search.num_skipped, time.monotonic() - started, load)


def _telling(measure: Measure, on_row: Callable[[Measured], None]) -> Measure:
    def measured(setup: Setup) -> Measured | None:
        row = measure(setup)
        if row is not None:
            on_row(row)
        return row

    return measured


def keep(result: Tuning, options: EngineOptions | None = None) -> Path:
    """Loads of this model on this machine read the result from now on. Raises OSError."""
    given = tuned_options.conditions(options or EngineOptions())
    return tuned_options.keep(result.fingerprint, given, result.chosen, result.rows)


def _load() -> float:
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):  # Windows
        return 0.0


def _without_choices(options: EngineOptions) -> EngineOptions:
    left: dict[str, Any] = {"n_parallel": None, "n_ubatch": None, "threads": None, "kv_layout": "auto"}
    return replace(options, **left, n_ctx=None, ctx_per_slot=CONTEXT, cache_dir=None)


def _plan(path: Path, options: EngineOptions, wanted: frozenset[Capability] | None, slots: int) -> tuple[LoadPlan, int]:
    """What the file is used for, and the most slots that fit into memory. Raises InsufficientMemory."""
    from cellama.engine.llama import devices, plan_load

    room = Budget("auto", devices).room()
    while True:
        plan = plan_load("tune", path, replace(options, n_parallel=slots), wanted, room)
        shortage = room.shortage(plan.footprint)
        if shortage is None:
            return plan, slots
        if slots == 1:
            needed, available = shortage.required_bytes, shortage.available_bytes
            raise InsufficientMemory(
                f"{str(path)!r} does not fit: it needs {readable(needed)} of {shortage.device}, available are "
                f"{readable(available)}; unload other models, or end other programs",
                *(shortage.device, needed, available),
            )
        slots //= 2
