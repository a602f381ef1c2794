"""`python -m cellama.engine.planning_process`: plans one load for `planning.py`. JSON on stdin, JSON on stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import tuned
from .budget import Room
from .errors import EngineError
from .llama import plan_load
from .params import EngineOptions
from .planning import plan_as_json


def main() -> None:
    try:
        answer = _plan(json.load(sys.stdin))
    except EngineError as error:
        answer = {"error": str(error), "code": error.code}
    except MemoryError:
        answer = {"error": "planning the load takes more memory than there is; the file may be damaged", "code": ""}
    json.dump(answer, sys.stdout)


def _plan(asked: dict[str, Any]) -> dict[str, Any]:
    path = Path(asked["path"])
    options, names = tuned.apply(EngineOptions(**asked["options"]), path)
    wanted = None if asked["wanted"] is None else frozenset(asked["wanted"])
    plan = plan_load(asked["model_id"], path, options, wanted, Room(asked["room"]))
    return plan_as_json(replace(plan, tuned=names))


if __name__ == "__main__":
    main()
