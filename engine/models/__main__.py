"""Plan a load, for the command `cellama models plan`, which must not import the engine.

The program reads one JSON object from stdin with `id`, `source`, `options` (settings of the model), `capabilities`,
`hub` and `memory_budget`. It writes `{"plan": …}` or `{"error": …, "code": …}`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from cellama.engine.errors import EngineError
from cellama.engine.llama import connect_all, devices
from cellama.engine.memory.budget import CPU, Budget
from cellama.engine.options import EngineOptions

from .memory_admission import plan_in_child
from .sources import HubOptions, resolve, with_draft_file


def main() -> int:
    """Plan the load and return the exit code, which is 1 after an error, and otherwise 0."""
    request = json.load(sys.stdin)
    try:
        print(json.dumps({"plan": _plan(request)}))
    except EngineError as error:
        print(json.dumps({"error": str(error), "code": error.code}))
        return 1
    return 0


def _plan(request: dict[str, Any]) -> dict[str, Any]:
    hub, known = HubOptions(**request["hub"]), EngineOptions.__dataclass_fields__
    given = {name: value for name, value in request["options"].items() if name in known and value is not None}
    options = with_draft_file(EngineOptions(**given), hub)
    path = resolve(request["source"], hub)
    connect_all(options)
    available = Budget(request["memory_budget"], devices).available()
    requested = request["capabilities"]
    plan = plan_in_child(request["id"], path, options, None if requested is None else frozenset(requested), available)
    shortage = available.shortage(plan.footprint)
    needed = plan.footprint.devices
    return {
        "model": request["id"],
        "file": str(path),
        "fits": shortage is None,
        "shortage": None if shortage is None else asdict(shortage),
        "capabilities": sorted(plan.uses.capabilities),
        "n_parallel": plan.options.num_slots,
        "ctx_per_slot": plan.options.ctx_per_slot,
        "n_gpu_layers": sum(count for name, count in plan.layers.items() if name != CPU),
        "num_layers": plan.num_layers,
        "budget_bytes": request["memory_budget"] if isinstance(request["memory_budget"], int) else None,
        "devices": [
            {
                "name": device.name,
                "description": device.description,
                "layers": plan.layers.get(device.name, 0),
                **{
                    name: getattr(needed[device.name], name) if device.name in needed else 0
                    for name in ("weights_bytes", "kv_bytes", "compute_bytes", "saved_bytes", "total_bytes")
                },
                "available_bytes": available.free.get(device.name),
            }
            for device in devices()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
