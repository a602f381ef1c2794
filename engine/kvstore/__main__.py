"""Inspect and clean up a state directory.

`cellama cache` runs this module in a child process, because the command itself must not import the engine.

`python -m cellama.engine.kvstore` reads one JSON object from stdin: `do` (list, info, clear, pin or unpin), `folder`,
`keys` (complete keys or their first digits), `scope` and `pinned`. The process writes `{"result": …}` or `{"error": …}`
to stdout.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .directory import StateDirectory
from .state_file import read_head
from .states import StateHead, StoredFile

MIN_DIGITS = 8  # digits of a key prefix: among 10,000 states, two keys share their first 8 with a probability of 1%


def main() -> int:
    """Run one command and return the exit code."""
    request = json.load(sys.stdin)
    try:
        # No command writes a state, so the quota is not used.
        result = _COMMANDS[request["do"]](StateDirectory(Path(request["folder"]), 0), request)
    except (OSError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"result": result}))
    return 0


def _list(directory: StateDirectory, request: dict[str, Any]) -> list[dict[str, Any]]:
    return [_describe(file) for file in reversed(directory.states())]


def _describe(file: StoredFile) -> dict[str, Any]:
    head = read_head(file.path)
    is_state = isinstance(head, StateHead)
    return {
        "key": file.key,
        "identity": file.identity,  # digest of everything that cells depend on, except tokens, adapters and scope
        "scope": head.scope if isinstance(head, StateHead) else "",
        "num_tokens": len(head.tokens) if isinstance(head, StateHead) else 0,
        "num_bytes": file.num_bytes,
        "last_used": file.last_used,  # Unix seconds
        "is_pinned": file.is_pinned,
        "problem": None if is_state else head,  # the reason why the file has no usable state (`Miss`)
    }


def _info(directory: StateDirectory, request: dict[str, Any]) -> dict[str, Any]:
    files = directory.states()
    pinned = [file for file in files if file.is_pinned]
    try:
        free_bytes = shutil.disk_usage(directory.root).free
    except OSError:
        free_bytes = None
    return {
        "folder": str(directory.root),
        "num_states": len(files),
        "num_bytes": sum(file.num_bytes for file in files),
        "num_pinned": len(pinned),
        "pinned_bytes": sum(file.num_bytes for file in pinned),
        "num_identities": len({file.identity for file in files}),
        "free_bytes": free_bytes,  # on the file system; None if unknown
    }


def _clear(directory: StateDirectory, request: dict[str, Any]) -> dict[str, int]:
    """Remove the states with the given keys, the states in the given scope, or all states.

    Pinned states are removed only if their keys are given, or if `pinned` is true.
    """
    if request["keys"]:
        paths = [path for key in _complete_keys(directory, request["keys"]) for path in directory.find(key)]
    else:
        files = [file for file in directory.states() if request["pinned"] or not file.is_pinned]
        paths = [file.path for file in files if request["scope"] is None or _has_scope(file, request["scope"])]
    num_bytes = sum(path.stat().st_size for path in paths if path.exists())
    return {"num_states": directory.remove(paths), "num_bytes": num_bytes}


def _has_scope(file: StoredFile, scope: str) -> bool:
    head = read_head(file.path)
    return isinstance(head, StateHead) and head.scope == scope


def _pin(directory: StateDirectory, request: dict[str, Any]) -> dict[str, bool]:
    return {key: directory.pin(key) for key in _complete_keys(directory, request["keys"])}


def _unpin(directory: StateDirectory, request: dict[str, Any]) -> dict[str, bool]:
    return {key: directory.unpin(key) for key in _complete_keys(directory, request["keys"])}


def _complete_keys(directory: StateDirectory, prefixes: list[str]) -> list[str]:
    """Return the complete key for each prefix.

    Raises ValueError if a prefix matches no key, or more than one key.
    """
    known = {file.key for file in directory.states()}
    found = []
    for prefix in prefixes:
        keys = [key for key in known if key.startswith(prefix)] if len(prefix) >= MIN_DIGITS else []
        if len(keys) != 1:
            remedy = "give more digits" if keys else f"`cellama cache list` shows keys; {MIN_DIGITS} digits are enough"
            raise ValueError(f"{len(keys) or 'no'} states have a key that starts with {prefix!r}; {remedy}")
        found += keys
    return found


_COMMANDS: dict[str, Callable[[StateDirectory, dict[str, Any]], Any]] = {
    "list": _list,
    "info": _info,
    "clear": _clear,
    "pin": _pin,
    "unpin": _unpin,
}

if __name__ == "__main__":
    sys.exit(main())
