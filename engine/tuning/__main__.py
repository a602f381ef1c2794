"""Tune a model. The command `cellama tune`, which must not import the engine, runs `python -m cellama.engine.tuning`.

The program reads one JSON object from stdin with `source`, `options` (fields of EngineOptions), `capabilities`, `hub`,
`seconds`, and optionally `max_threads`, `max_slots` and `memory` (a memory budget). The program then writes one JSON
object per line: `{"row": …}` after each measured setup, and finally `{"result": …}` or `{"error": …, "code": …}`. The
result is stored before it is written.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from cellama.engine.errors import EngineError
from cellama.engine.llama import machine
from cellama.engine.models import tuned_options
from cellama.engine.models.sources import HubOptions
from cellama.engine.options import EngineOptions

from .measure import tune


def main() -> int:
    """Tune the model and return the exit code, which is 1 after an error, 130 after an interrupt, or otherwise 0."""
    arguments = json.load(sys.stdin)
    try:
        options, hub = EngineOptions(**arguments.pop("options")), HubOptions(**arguments.pop("hub"))
        result = tune(options=options, hub=hub, on_row=lambda row: _write({"row": asdict(row)}), **arguments)
    except EngineError as error:
        _write({"error": str(error), "code": error.code})
        return 1
    except KeyboardInterrupt:
        return 130
    kept, problem = None, None
    try:
        kept = str(
            tuned_options.store_result(result.fingerprint, tuned_options.conditions(options), result.chosen.setup)
        )
    except OSError as error:
        problem = str(error)
    _write({"result": asdict(result) | {"machine": machine(), "kept": kept, "problem": problem}})
    return 0


def _write(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
