"""`python -m cellama.engine.kvstore`: a folder of states for `cellama cache`, which must not import the engine.

It reads one JSON object from stdin: `do` (list, info, clear, pin, unpin), `folder`, `keys` (or how they begin),
`scope`, `pinned`. It writes one: `{"result": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .files.folder import Folder
from .files.listing import of_scope, view_of, view_of_folder

Asked = dict[str, Any]
SHORTEST = 8  # digits that may stand for a key


def main() -> int:
    """The exit code: 0, or 1 for what went wrong."""
    asked = json.load(sys.stdin)
    try:
        # Nothing is written, so no quota is needed.
        result = _DO[asked["do"]](Folder(Path(asked["folder"]), 0), asked)
    except (OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"result": result}))
    return 0


def _list(folder: Folder, asked: Asked) -> list[dict[str, Any]]:
    return [asdict(view_of(file)) for file in reversed(folder.states())]


def _info(folder: Folder, asked: Asked) -> dict[str, Any]:
    return asdict(view_of_folder(folder))


def _clear(folder: Folder, asked: Asked) -> dict[str, int]:
    """Those of the keys, or else of the scope, or else all; but for the pinned, if those are not meant."""
    if asked["keys"]:
        paths = [path for key in _whole(folder, asked["keys"]) for path in folder.find(key)]
    else:
        files = folder.states()
        if asked["scope"] is not None:
            files = list(of_scope(files, asked["scope"]))
        paths = [file.path for file in files if asked["pinned"] or not file.is_pinned]
    num_bytes = sum(path.stat().st_size for path in paths if path.exists())
    return {"num_states": folder.remove(paths), "num_bytes": num_bytes}


def _pin(folder: Folder, asked: Asked) -> dict[str, bool]:
    return {key: folder.pin(key) for key in _whole(folder, asked["keys"])}


def _unpin(folder: Folder, asked: Asked) -> dict[str, bool]:
    return {key: folder.unpin(key) for key in _whole(folder, asked["keys"])}


def _whole(folder: Folder, beginnings: list[str]) -> list[str]:
    """The keys that begin so. ValueError for what no state has, or more than one."""
    known = {file.key for file in folder.states()}
    found = []
    for beginning in beginnings:
        keys = [key for key in known if key.startswith(beginning)] if len(beginning) >= SHORTEST else []
        if len(keys) != 1:
            remedy = "give more digits" if keys else f"`cellama cache list` shows keys; {SHORTEST} digits are enough"
            raise ValueError(f"{len(keys) or 'no'} states have a key that begins with {beginning!r}: {remedy}")
        found += keys
    return found


_DO: dict[str, Callable[[Folder, Asked], Any]] = {
    "list": _list,
    "info": _info,
    "clear": _clear,
    "pin": _pin,
    "unpin": _unpin,
}

if __name__ == "__main__":
    sys.exit(main())
