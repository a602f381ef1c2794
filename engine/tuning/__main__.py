"""`python -m cellama.engine.tuning`: tunes a model for `cellama tune`, which must not import the engine.

It reads one JSON object from stdin: `source`, `options` (as EngineOptions), `capabilities`, `hub`, `seconds`,
`max_threads`, `max_slots`. It writes a JSON object per line: `{"row": …}` as each setup is measured, then
`{"result": …}` or `{"error": …, "code": …}`. The result is kept when it is written.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

from cellama.engine.errors import EngineError
from cellama.engine.llama import machine
from cellama.engine.models.sources import HubOptions
from cellama.engine.options import EngineOptions

from .measure import keep, tune


def main() -> int:
    """The exit code: 0, 1 for what went wrong, 130 when it was interrupted."""
    try:
        _run(json.load(sys.stdin))
    except EngineError as error:
        _say({"error": str(error), "code": error.code})
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(asked: dict[str, Any]) -> None:
    options = EngineOptions(**asked["options"])
    result = tune(
        asked["source"],
        options=options,
        capabilities=asked["capabilities"],
        hub=HubOptions(**asked["hub"]),
        seconds=asked["seconds"],
        max_threads=asked["max_threads"],
        max_slots=asked["max_slots"],
        on_row=lambda row: _say({"row": asdict(row)}),
    )
    try:
        kept, problem = str(keep(result, options)), None
    except OSError as error:
        kept, problem = None, str(error)
    _say({"result": asdict(result) | {"machine": machine(), "kept": kept, "problem": problem}})


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.exit(main())
