"""The plan of a load, made in a process of its own: a damaged file ends that process, and not one that serves.

llama.cpp checks much of a file by assertions, which end the process. What they refuse is found here: the child reads
the file's head, vocabulary and shapes as the real load does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cellama.engine.errors import EngineError, InvalidRequest, ModelLoadFailed, WrongCapability
from cellama.engine.memory.budget import AvailableMemory, Footprint, MemoryUse
from cellama.engine.memory.free_memory import ram
from cellama.engine.options import Capability, EngineOptions, Uses
from cellama.engine.system.confined import confine, describe_exit

from . import tuned_options

if TYPE_CHECKING:
    from cellama.engine.llama import LoadPlan

TIMEOUT_S = 120.0  # seconds; a plan takes less than one, and a few alongside a busy engine
CPU_S = 60  # seconds of processor time; a plan takes less than one
LEAST_DATA_BYTES = 2 << 30  # bytes that the child may allocate in any case, or as many as the machine has RAM
_BUILD_FOLDER = re.compile(r"^\S*/(?=[\w.-]+:\d+:)")  # of an assertion's source file
_ERRORS: dict[str, type[EngineError]] = {
    error.code: error for error in (ModelLoadFailed, WrongCapability, InvalidRequest)
}


def plan_apart(
    model_id: str, path: Path, options: EngineOptions, wanted: frozenset[Capability] | None, room: AvailableMemory
) -> LoadPlan:
    """As `llama.plan_load`, with what `cellama tune` chose for what the options leave open (tuned_options.py).

    With what its draft model takes, if it has one. Raises ModelLoadFailed, for a file that ends llama.cpp, too;
    WrongCapability, InvalidRequest.
    """
    plan = _plan_one(model_id, path, options, wanted, room)
    if plan.options.draft is None:
        return plan
    if not plan.uses.generates:
        raise ModelLoadFailed(f"model {model_id!r} generates no tokens, so it can have no draft model; leave out draft")
    draft = _plan_draft(path, plan.options, room)
    if room.shortage(plan.footprint.plus(draft)) is not None:  # sizes that were left open filled it
        plan = _plan_one(model_id, path, options, wanted, room.minus(draft))
        draft = _plan_draft(path, plan.options, room)
    return replace(plan, footprint=plan.footprint.plus(draft))


def _plan_draft(path: Path, options: EngineOptions, room: AvailableMemory) -> Footprint:
    """What the draft model for the model at `path` takes; raises unless it can be that."""
    assert options.draft is not None
    wanted: frozenset[Capability] = frozenset({"generate"})
    return _plan_one("draft", Path(options.draft), options.of_draft, wanted, room, guesses_for=path).footprint


def _plan_one(
    model_id: str,
    path: Path,
    options: EngineOptions,
    wanted: frozenset[Capability] | None,
    room: AvailableMemory,
    *,
    guesses_for: Path | None = None,
) -> LoadPlan:
    asked = {
        "model_id": model_id,
        "path": str(path),
        "options": asdict(options),
        "wanted": None if wanted is None else sorted(wanted),
        "room": dict(room.free),
        "guesses_for": None if guesses_for is None else str(guesses_for),
    }
    answer = _answer_of_child(path, json.dumps(asked))
    if "error" in answer:
        raise _ERRORS.get(answer["code"], ModelLoadFailed)(answer["error"])
    return _plan_of(answer)


def _answer_of_child(path: Path, asked: str) -> Mapping[str, Any]:
    child = subprocess.Popen(
        [sys.executable, "-m", "cellama.engine.models.planning"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        start_new_session=True,  # Ctrl-C is for the parent
    )
    confine(child.pid, data_bytes=max(LEAST_DATA_BYTES, ram()[1]), cpu_s=CPU_S)
    with child:
        try:
            said, complaints = child.communicate(asked, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            raise ModelLoadFailed(
                f"the load of {str(path)!r} was not planned within {TIMEOUT_S:g} s; the file may be damaged: "
                "fetch or convert it again"
            ) from None
    if child.returncode == 0:
        answer: Mapping[str, Any] = json.loads(said)
        return answer
    last = next((line.strip() for line in reversed(complaints.splitlines()) if line.strip()), "no reason given")
    reason = f"{describe_exit(child.returncode)}: {_BUILD_FOLDER.sub('', last)}"
    raise ModelLoadFailed(
        f"llama.cpp ends over {str(path)!r} ({reason}); the file is damaged or of an unsupported kind: "
        "fetch or convert it again"
    )


def _plan_as_json(plan: LoadPlan) -> dict[str, Any]:
    """What the child writes."""
    return {
        "options": asdict(plan.options),
        "footprint": {name: asdict(usage) for name, usage in plan.footprint.devices.items()},
        "capabilities": sorted(plan.uses.capabilities),
        "pooling": plan.uses.pooling,
        "tuned": list(plan.tuned),
    }


def _plan_of(answer: Mapping[str, Any]) -> LoadPlan:
    from cellama.engine.llama import LoadPlan

    footprint = Footprint({name: MemoryUse(**usage) for name, usage in answer["footprint"].items()})
    uses = Uses(frozenset(answer["capabilities"]), answer["pooling"])
    return LoadPlan(EngineOptions(**answer["options"]), footprint, uses, tuned=tuple(answer["tuned"]))


# The child


def main() -> None:
    """Plan one load in the child: JSON in, JSON out."""
    try:
        answer = _plan(json.load(sys.stdin))
    except EngineError as error:
        answer = {"error": str(error), "code": error.code}
    except MemoryError:
        answer = {"error": "planning the load takes more memory than there is; the file may be damaged", "code": ""}
    json.dump(answer, sys.stdout)


def _plan(asked: dict[str, Any]) -> dict[str, Any]:
    from cellama.engine.llama import check_draft, plan_load

    path = Path(asked["path"])
    options, names = EngineOptions(**asked["options"]), tuple[str, ...]()
    if asked["guesses_for"] is None:
        options, names = tuned_options.apply(options, path)
    else:
        check_draft(path, Path(asked["guesses_for"]))
    wanted = None if asked["wanted"] is None else frozenset(asked["wanted"])
    plan = plan_load(asked["model_id"], path, options, wanted, AvailableMemory(asked["room"]))
    return _plan_as_json(replace(plan, tuned=names))


if __name__ == "__main__":
    main()
