"""`python -m cellama.engine.models.planning_process`: plans one load for `planning.py`, JSON in, JSON out."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cellama.engine.errors import EngineError
from cellama.engine.llama import check_draft, plan_load
from cellama.engine.memory.budget import Room
from cellama.engine.options import EngineOptions

from . import tuned_options
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
    options, names = EngineOptions(**asked["options"]), tuple[str, ...]()
    if asked["guesses_for"] is None:
        options, names = tuned_options.apply(options, path)
    else:
        check_draft(path, Path(asked["guesses_for"]))
    wanted = None if asked["wanted"] is None else frozenset(asked["wanted"])
    plan = plan_load(asked["model_id"], path, options, wanted, Room(asked["room"]))
    return plan_as_json(replace(plan, tuned=names))


if __name__ == "__main__":
    main()
