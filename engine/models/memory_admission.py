"""Admit models: plan each load in a child process, and allow it only if the model fits into the memory budget.

llama.cpp checks many properties of a file with assertions, which abort the process. The child process reads the file's
header, vocabulary and tensor shapes as the actual load does. A damaged file therefore aborts the child process instead
of a serving process.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from cellama.config.logging import event_logger
from cellama.engine.errors import EngineError, InsufficientMemory, InvalidRequest, ModelLoadFailed, WrongCapability
from cellama.engine.memory.budget import (
    AvailableMemory,
    Budget,
    Device,
    Footprint,
    MemoryBudget,
    MemoryUse,
    OnFull,
    Shortage,
    Vram,
    choose_victims,
    readable,
    vram_of,
)
from cellama.engine.memory.free_memory import ram
from cellama.engine.options import Capability, EngineOptions, Uses
from cellama.engine.system.confined import confine, describe_exit
from cellama.engine.system.threads import at_low_priority

from . import tuned_options

if TYPE_CHECKING:
    from cellama.engine.llama import LoadPlan

log = event_logger(__name__)

TIMEOUT_S = 120.0  # seconds; a plan usually takes less than 1 s, and a few seconds while an engine is busy
CPU_S = 60  # seconds of processor time; a plan takes less than 1 s
MIN_DATA_BYTES = 2 << 30  # the child may allocate the free RAM, and at least this
_ON_CPU: dict[str, Any] = {
    "n_gpu_layers": 0,
    "devices": (),
    "split_mode": "layer",
    "tensor_split": None,
    "main_gpu": 0,
    "override_tensors": (),
}
_BUILD_DIRECTORY = re.compile(r"^\S*/(?=[\w.-]+:\d+:)")  # the path of the source file in an assertion's message
_ERRORS: dict[str, type[EngineError]] = {
    error.code: error for error in (ModelLoadFailed, WrongCapability, InvalidRequest)
}


class MemoryAdmission:
    """Keeps the memory use of a process's models within a budget. Any thread may use it.

    Only one load is planned at a time, so two loads can't reserve the same memory. The loads themselves run
    concurrently.
    """

    def __init__(
        self,
        limit: MemoryBudget,
        on_full: OnFull,
        idle: Callable[[], Sequence[str]],
        evict: Callable[[str], None],
        num_saved: Callable[[str], int],
    ) -> None:
        """Create the budget. Raises InvalidRequest.

        `idle` returns the ids of the models that may be unloaded, least recently used first. `evict` returns only after
        the model has been unloaded. `num_saved` returns the size in bytes of a model's states in RAM.
        """
        if not (limit in ("auto", "unlimited") or (isinstance(limit, int) and limit > 0)):
            raise InvalidRequest(
                f"memory_budget: {limit!r} is invalid; use auto, unlimited, or a number of bytes above 0"
            )
        if on_full not in get_args(OnFull):
            raise InvalidRequest(f"on_full: {on_full!r} is invalid; use refuse or evict")
        from cellama.engine.llama import devices

        self.on_full: OnFull = on_full
        self.evict = evict
        self._idle = idle
        self.budget = Budget(limit, devices, num_saved)
        self._plan_lock = threading.Lock()
        self._remembered: dict[str, LoadPlan] = {}  # by `_plan_key`

    def plan(
        self,
        model_id: str,
        path: Path,
        options: EngineOptions,
        requested: frozenset[Capability] | None,
        evictable: Collection[str],
    ) -> LoadPlan:
        """Plan a load in the memory that is available without the `evictable` models, and remember the plan.

        Later loads of the same file reuse the plan while it fits, which saves starting the child process. Raises
        ModelLoadFailed, WrongCapability, InvalidRequest.
        """
        from cellama.engine.llama import connect_all

        key = _plan_key(path, options, requested)
        if key in self._remembered:
            return self._remembered[key]
        with self._plan_lock:
            connect_all(options)
            taken = self.budget.taken()
            available = self.budget.available().plus(taken[other] for other in evictable if other in taken)
            plan = at_low_priority(functools.partial(plan_in_child, model_id, path, options, requested, available))
            self._remembered[key] = plan
        return plan

    def admit(
        self, model_id: str, path: Path, options: EngineOptions, requested: frozenset[Capability] | None
    ) -> LoadPlan:
        """Plan a load and reserve its memory.

        The plan contains the tuned options, the context size, and the capabilities. Raises InsufficientMemory,
        ModelLoadFailed, WrongCapability, InvalidRequest.
        """
        from cellama.engine.llama import connect_all

        failed: set[str] = set()  # models that could not be evicted
        with self._plan_lock:
            connect_all(options)  # so that the budget knows the devices of RPC servers
            remembered = self._remembered.get(_plan_key(path, options, requested))
            while True:
                available = self.budget.available()
                if remembered is not None and available.shortage(remembered.footprint) is None:
                    plan = remembered
                    break
                plan = at_low_priority(functools.partial(plan_in_child, model_id, path, options, requested, available))
                shortage = None if self.budget.limit == "unlimited" else available.shortage(plan.footprint)
                if shortage is None:
                    break
                if not self._evict_idle(model_id, plan.footprint, failed):
                    raise self._refusal(model_id, plan, shortage)
            self.budget.reserve(model_id, plan.footprint)
        return plan

    def report(self) -> dict[str, Any]:
        """Return the memory budget, the action to take when the budget is full, and the devices."""
        found = devices()
        vram = vram_of(found)
        return {
            "budget": self.budget.limit,
            "on_full": self.on_full,
            "devices": [asdict(device) for device in found],
            "vram": None if vram is None else asdict(vram),
        }

    def _evict_idle(self, model_id: str, footprint: Footprint, failed: set[str]) -> bool:
        """Evict idle models if eviction is allowed and frees enough memory.

        Return True if models were chosen for eviction, in which case the caller should retry the load.
        """
        if self.on_full != "evict":
            return False
        taken = self.budget.taken()
        idle = [(other, taken[other]) for other in self._idle() if other in taken and other not in failed]
        victims = choose_victims(self.budget.available(), footprint, idle)
        for victim in victims:
            log.info("model eviction started", model=victim, detail=f"the memory is needed for model {model_id}")
            try:
                self.evict(victim)
            except EngineError as error:
                log.warning("model eviction failed", model=victim, detail=str(error))
                failed.add(victim)
        return bool(victims)

    def _refusal(self, model_id: str, plan: LoadPlan, shortage: Shortage) -> InsufficientMemory:
        device, limit = shortage.device, self.budget.limit
        others = [
            (other, size) for other, taken in self.budget.taken().items() if (size := taken.on(device).total_bytes)
        ]
        draft = ", remove the draft option" if plan.options.draft else ""
        unload = _models_to_unload(others, shortage.required_bytes - shortage.available_bytes)
        return InsufficientMemory(
            f"model {model_id!r} does not fit: it needs {readable(shortage.required_bytes)} on {device} "
            f"({_describe_usage(plan, device)}), but only {readable(shortage.available_bytes)} are available "
            f"(memory_budget is {limit if isinstance(limit, str) else readable(limit)}); lower "
            "n_parallel, ctx_per_slot or cache_ram_bytes, set cache_type_k and cache_type_v to q8_0, raise "
            f"memory_budget{draft}{unload}",
            device=device,
            required_bytes=shortage.required_bytes,
            available_bytes=shortage.available_bytes,
        )


def _plan_key(path: Path, options: EngineOptions, requested: frozenset[Capability] | None) -> str:
    """Return a key that changes if the result of a plan may change, except for the available memory."""
    files = [path, *([Path(options.draft)] if options.draft else []), tuned_options.directory()]
    stats = [(file.stat() if file.exists() else None) for file in files]
    versions = [stat and (stat.st_size, stat.st_mtime_ns) for stat in stats]
    return repr((str(path), versions, options, requested and sorted(requested)))


def _models_to_unload(others: list[tuple[str, int]], missing_bytes: int) -> str:
    """Return advice on which models to unload.

    The advice names the smallest model that frees enough memory, or else all models. If unloading all models would not
    be enough, return "".
    """
    enough = [other for other in others if other[1] >= missing_bytes]
    if enough:
        others = [min(enough, key=lambda other: other[1])]
    elif sum(size for _, size in others) < missing_bytes:
        return ""
    return ", or unload " + " and ".join(f"{name!r} ({readable(size)})" for name, size in others)


def _describe_usage(plan: LoadPlan, device: str) -> str:
    usage, context = plan.footprint.on(device), ""
    if plan.options.ctx_per_slot:
        context = f" for {plan.options.num_slots} slots of {plan.options.ctx_per_slot} tokens"
    parts = (
        *(("weights", usage.weights_bytes), ("KV cache" + context, usage.kv_bytes), ("compute", usage.compute_bytes)),
        ("saved states", usage.saved_bytes),
    )
    return ", ".join(f"{name} {readable(size)}" for name, size in parts if size)


def devices() -> list[Device]:
    """Return the devices that models can use, and the total and free memory of each device in bytes.

    Without a GPU build of llama.cpp, the CPU is the only device.
    """
    from cellama.engine.llama import devices

    return devices()


def vram_info() -> Vram | None:
    """Return the total, free and used memory of all GPUs together, in bytes.

    Return None if the machine has no GPU or llama.cpp was built without GPU support.
    """
    return vram_of(devices())


# The plan, in a child process


def plan_in_child(
    model_id: str,
    path: Path,
    options: EngineOptions,
    requested: frozenset[Capability] | None,
    available: AvailableMemory,
) -> LoadPlan:
    """Plan a load in a child process, like `llama.plan_load`.

    Unset options get the values chosen by `cellama tune`. The plan includes the memory of the draft model. Raises
    WrongCapability and InvalidRequest. Raises ModelLoadFailed if the file can't be loaded or makes llama.cpp abort.
    """
    plan = _plan_one(model_id, path, options, requested, available)
    if plan.options.draft is None:
        return plan
    if not plan.uses.generates:
        raise ModelLoadFailed(
            f"draft: model {model_id!r} doesn't generate text, so it can't have a draft model; remove the draft option"
        )
    draft = _plan_draft(path, plan.options, available)
    if available.shortage(plan.footprint.plus(draft)) is not None:
        # The sizes chosen for unset options take the memory of the draft model, so plan again with what remains.
        plan = _plan_one(model_id, path, options, requested, available.minus(draft))
        draft = _plan_draft(path, plan.options, available)
    return replace(plan, footprint=plan.footprint.plus(draft))


def _plan_draft(path: Path, options: EngineOptions, available: AvailableMemory) -> Footprint:
    """Return the memory required by the draft model of the model at `path`.

    Raises ModelLoadFailed if the draft model isn't compatible with the model at `path`.
    """
    assert options.draft is not None
    requested: frozenset[Capability] = frozenset({"generate"})
    return _plan_one("draft", Path(options.draft), options.of_draft, requested, available, drafts_for=path).footprint


def _plan_one(
    model_id: str,
    path: Path,
    options: EngineOptions,
    requested: frozenset[Capability] | None,
    available: AvailableMemory,
    *,
    drafts_for: Path | None = None,
) -> LoadPlan:
    request = {
        "model_id": model_id,
        "path": str(path),
        "options": asdict(options),
        "capabilities": None if requested is None else sorted(requested),
        "available": dict(available.free),
        "drafts_for": None if drafts_for is None else str(drafts_for),
    }
    if not options.rpc:
        return _plan_of(_checked(_run_child(path, json.dumps(request))))
    # An RPC server serves one process at a time, which may be this one, so the child only checks the file.
    on_cpu = replace(options, rpc=(), **_ON_CPU)
    _checked(_run_child(path, json.dumps({**request, "options": asdict(on_cpu)})))
    return _plan_of(_plan(request))


def _checked(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the child's answer, or raise the error that it contains."""
    if "error" in answer:
        raise _ERRORS.get(answer["code"], ModelLoadFailed)(answer["error"])
    return answer


def _run_child(path: Path, request: str) -> Mapping[str, Any]:
    child = subprocess.Popen(
        [sys.executable, "-m", "cellama.engine.models.memory_admission"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        start_new_session=True,  # so that Ctrl-C interrupts only the parent
    )
    confine(child.pid, data_bytes=max(MIN_DATA_BYTES, ram()[1]), cpu_s=CPU_S)
    with child:
        try:
            output, errors = child.communicate(request, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            raise ModelLoadFailed(
                f"planning the load of {str(path)!r} took longer than {TIMEOUT_S:g} s; the file may be damaged: "
                "download or convert it again"
            ) from None
    if child.returncode == 0:
        answer: Mapping[str, Any] = json.loads(output)
        return answer
    last_line = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no reason given")
    reason = f"{describe_exit(child.returncode)}: {_BUILD_DIRECTORY.sub('', last_line)}"
    raise ModelLoadFailed(
        f"llama.cpp can't read {str(path)!r} ({reason}); the file is damaged or unsupported: "
        "download or convert it again"
    )


def _plan_as_json(plan: LoadPlan) -> dict[str, Any]:
    """Convert the plan to the JSON data that the child process writes."""
    return {
        "options": asdict(plan.options),
        "footprint": {name: asdict(usage) for name, usage in plan.footprint.devices.items()},
        "capabilities": sorted(plan.uses.capabilities),
        "pooling": plan.uses.pooling,
        "layers": dict(plan.layers),
        "tuned": list(plan.tuned),
    }


def _plan_of(answer: Mapping[str, Any]) -> LoadPlan:
    from cellama.engine.llama import LoadPlan

    footprint = Footprint({name: MemoryUse(**usage) for name, usage in answer["footprint"].items()})
    uses = Uses(frozenset(answer["capabilities"]), answer["pooling"])
    return LoadPlan(EngineOptions(**answer["options"]), footprint, uses, answer["layers"], tuned=tuple(answer["tuned"]))


# In the child


def main() -> None:
    """Plan one load in the child process.

    The request is read from stdin as JSON, and the result is written to stdout as JSON.
    """
    try:
        answer = _plan(json.load(sys.stdin))
    except EngineError as error:
        answer = {"error": str(error), "code": error.code}
    except MemoryError:
        answer = {"error": "planning the load needs more memory than is available; the file may be damaged", "code": ""}
    json.dump(answer, sys.stdout)


def _plan(request: dict[str, Any]) -> dict[str, Any]:
    from cellama.engine.llama import check_draft, plan_load

    path = Path(request["path"])
    options, names = EngineOptions(**request["options"]), tuple[str, ...]()
    if request["drafts_for"] is None:
        options, names = tuned_options.apply(options, path)
    else:
        check_draft(path, Path(request["drafts_for"]))
    requested = None if request["capabilities"] is None else frozenset(request["capabilities"])
    plan = plan_load(request["model_id"], path, options, requested, AvailableMemory(request["available"]))
    return _plan_as_json(replace(plan, tuned=names))


if __name__ == "__main__":
    main()
