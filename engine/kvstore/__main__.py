"""`python -m cellama.engine.kvstore`: a directory of states for `cellama cache`, which must not import the engine.

It reads one JSON object from stdin: `do` (list, info, clear, pin, unpin), `folder`, `keys` (or their first digits),
`scope`, `pinned`. It writes one to stdout: `{"result": …}` or `{"error": …}`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .folder import Folder
from .state_file import read_head
from .states import KeptFile, StateHead

MIN_DIGITS = 8  # that may stand for a key: two of 10,000 states begin alike once in a hundred directories


def main() -> int:
    """Run one command; return the exit code."""
    asked = json.load(sys.stdin)
    try:
        # Nothing is written, so no quota is needed.
        result = _COMMANDS[asked["do"]](Folder(Path(asked["folder"]), 0), asked)
    except (OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"result": result}))
    return 0


def _list(folder: Folder, asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [_described(file) for file in reversed(folder.states())]


def _described(file: KeptFile) -> dict[str, Any]:
    head = read_head(file.path)
    is_state = isinstance(head, StateHead)
    return {
        "key": file.key,
        "identity": file.identity,  # a digest of what cells depend on beside tokens, adapters and scope
        "scope": head.scope if isinstance(head, StateHead) else "",
        "num_tokens": len(head.tokens) if isinstance(head, StateHead) else 0,
        "num_bytes": file.num_bytes,
        "last_used": file.last_used,  # unix seconds
        "is_pinned": file.is_pinned,
        "problem": None if is_state else head,  # why the file gives no state: a reason of `Miss`
    }


def _info(folder: Folder, asked: dict[str, Any]) -> dict[str, Any]:
    files = folder.states()
    pinned = [file for file in files if file.is_pinned]
    try:
        free_bytes = shutil.disk_usage(folder.root).free
    except OSError:
        free_bytes = None
    return {
        "folder": str(folder.root),
        "num_states": len(files),
        "num_bytes": sum(file.num_bytes for file in files),
        "num_pinned": len(pinned),
        "pinned_bytes": sum(file.num_bytes for file in pinned),
        "num_identities": len({file.identity for file in files}),
        "free_bytes": free_bytes,  # of the file system; None if that is unknown
    }


def _clear(folder: Folder, asked: dict[str, Any]) -> dict[str, int]:
    """Remove the states of the keys, else of the scope, else all; pinned ones only by key, or if `pinned` says so."""
    if asked["keys"]:
        paths = [path for key in _whole_keys(folder, asked["keys"]) for path in folder.find(key)]
    else:
        files = [file for file in folder.states() if asked["pinned"] or not file.is_pinned]
        paths = [file.path for file in files if asked["scope"] is None or _is_of_scope(file, asked["scope"])]
    num_bytes = sum(path.stat().st_size for path in paths if path.exists())
    return {"num_states": folder.remove(paths), "num_bytes": num_bytes}


def _is_of_scope(file: KeptFile, scope: str) -> bool:
    head = read_head(file.path)
    return isinstance(head, StateHead) and head.scope == scope


def _pin(folder: Folder, asked: dict[str, Any]) -> dict[str, bool]:
    return {key: folder.pin(key) for key in _whole_keys(folder, asked["keys"])}


def _unpin(folder: Folder, asked: dict[str, Any]) -> dict[str, bool]:
    return {key: folder.unpin(key) for key in _whole_keys(folder, asked["keys"])}


def _whole_keys(folder: Folder, beginnings: list[str]) -> list[str]:
    """Return the keys that begin so. Raises ValueError where no state has such a key, or more than one."""
    known = {file.key for file in folder.states()}
    found = []
    for beginning in beginnings:
        keys = [key for key in known if key.startswith(beginning)] if len(beginning) >= MIN_DIGITS else []
        if len(keys) != 1:
            remedy = "give more digits" if keys else f"`cellama cache list` shows keys; {MIN_DIGITS} digits are enough"
            raise ValueError(f"{len(keys) or 'no'} states have a key that begins with {beginning!r}: {remedy}")
        found += keys
    return found


_COMMANDS: dict[str, Callable[[Folder, dict[str, Any]], Any]] = {
    "list": _list,
    "info": _info,
    "clear": _clear,
    "pin": _pin,
    "unpin": _unpin,
}

if __name__ == "__main__":
    sys.exit(main())
