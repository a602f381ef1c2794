"""`cellama cache`: the directory of KV states on disk. The commands need neither a worker nor Redis."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cellama.config import get_settings
from cellama.tasks.contract.codes import Exit

from .generation import JsonOption
from .output import out, print_error, print_json, readable, readable_time, table_of
from .services import check_installed

SHOWN_DIGITS = 16  # of a key in a table: enough to be unique; --json has all
FolderOption = Annotated[
    Path | None,
    typer.Option("--dir", help="Directory of the states (default: cache_dir of the settings).", show_default=False),
]
KeysArgument = Annotated[list[str], typer.Argument(help="Keys of states, or their first 8 or more digits.")]


def cache_list_command(folder: FolderOption = None, json: JsonOption = False) -> None:
    """List the KV states on disk, the most recently used first.

    Example:  cellama cache list --dir /var/cache/cellama
    """
    states = _ask("list", folder)
    if json:
        print_json(states)
        return
    if not states:
        out.print("there are no states" + (f" in {escape(str(folder))}" if folder else ""))
        return
    table = table_of("key", "model", "scope", "tokens", "size", "last used", "", right="tokens, size")
    for state in states:
        remark = f"[red]{state['problem']}[/]" if state["problem"] else "pinned" * state["is_pinned"]
        table.add_row(
            state["key"][:SHOWN_DIGITS],
            state["identity"][:8],
            escape(state["scope"]),
            str(state["num_tokens"] or ""),
            readable(state["num_bytes"]),
            readable_time(state["last_used"]),
            remark,
        )
    out.print(table)


def cache_info_command(folder: FolderOption = None, json: JsonOption = False) -> None:
    """Show how many KV states are on disk, and how large they are.

    Example:  cellama cache info --json --dir /var/cache/cellama
    """
    info = _ask("info", folder)
    if json:
        print_json(info)
        return
    of_which = f", of which {info['num_pinned']} pinned ({readable(info['pinned_bytes'])})" * bool(info["num_pinned"])
    out.print(f"{info['folder']}: {info['num_states']} states of {info['num_identities']} models", markup=False)
    out.print(f"{readable(info['num_bytes'])}{of_which}", markup=False)
    if info["free_bytes"] is not None:
        out.print(f"{readable(info['free_bytes'])} are free on the disk")


def cache_clear_command(
    folder: FolderOption = None,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys of states (default: all that are not pinned).")] = None,
    scope: Annotated[str | None, typer.Option(help="Remove only states of this scope (cache_scope of jobs).")] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Also remove pinned states.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove KV states from the disk. Running workers continue, and compute what they miss.

    Example:  cellama cache clear --scope customer-7 --pinned --dir /var/cache/cellama
    """
    if keys and (scope is not None or pinned):
        raise typer.BadParameter(
            "give either keys, or --scope and --pinned: a state that is named by its key is removed, pinned or not"
        )
    cleared = _ask("clear", folder, keys=keys or [], scope=scope, pinned=pinned)
    if json:
        print_json(cleared)
    else:
        out.print(f"removed {cleared['num_states']} states, {readable(cleared['num_bytes'])}")


def cache_pin_command(keys: KeysArgument, folder: FolderOption = None, json: JsonOption = False) -> None:
    """Pin KV states: they are never evicted for the quota.

    Example:  cellama cache pin 3f2a90c1d4e5b687 --dir /var/cache/cellama
    """
    _mark("pin", keys, folder, json)


def cache_unpin_command(keys: KeysArgument, folder: FolderOption = None, json: JsonOption = False) -> None:
    """Unpin KV states: they may be evicted for the quota.

    Example:  cellama cache unpin 3f2a90c1d4e5b687 --dir /var/cache/cellama
    """
    _mark("unpin", keys, folder, json)


def _mark(what: str, keys: list[str], folder: Path | None, json: bool) -> None:
    done = _ask(what, folder, keys=keys)
    if json:
        print_json(done)
        return
    for key, was_done in done.items():
        out.print(f"{key[:SHOWN_DIGITS]} {'is' if was_done else 'was not'} {what}ned")


def _folder_of_settings() -> Path:
    named = get_settings().cache_dir
    if named is None:
        raise typer.BadParameter("the settings name no cache_dir; name the directory", param_hint="--dir")
    return Path(named).expanduser()


def _ask(what: str, folder: Path | None, **asked: Any) -> Any:
    """Return the result of a command of `python -m cellama.engine.kvstore`: `api` never imports the engine."""
    check_installed()
    request = {
        "do": what,
        "folder": str(folder or _folder_of_settings()),
        "keys": [],
        "scope": None,
        "pinned": False,
        **asked,
    }
    argv = [sys.executable, "-m", "cellama.engine.kvstore"]
    done = subprocess.run(argv, input=json_module.dumps(request), stdout=subprocess.PIPE, text=True, check=False)
    answer = json_module.loads(done.stdout or "{}")
    if "result" not in answer:
        print_error(answer.get("error") or f"the command on the directory ended with exit code {done.returncode}")
        raise typer.Exit(Exit.FAILED)
    return answer["result"]
