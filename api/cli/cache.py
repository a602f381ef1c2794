"""`cellama cache`: the folder of KV states on disk. It works on the folder alone, whatever runs or not."""

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
from .memory import readable
from .output import out, print_error, print_json, readable_time, table_of
from .services import check_installed

KEY_SHOWN = 16  # digits; --json has all
FolderOption = Annotated[
    Path | None,
    typer.Option("--dir", help="The folder of states; default: cache_dir of the settings.", show_default=False),
]
KeysArgument = Annotated[list[str], typer.Argument(help="Keys of states, or their first digits, 8 or more.")]


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
            state["key"][:KEY_SHOWN],
            state["identity"][:8],
            escape(state["scope"]),
            str(state["num_tokens"] or ""),
            readable(state["num_bytes"]),
            readable_time(state["last_used"]),
            remark,
        )
    out.print(table)


def cache_info_command(folder: FolderOption = None, json: JsonOption = False) -> None:
    """Show how much the folder of KV states holds.

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
    keys: Annotated[list[str] | None, typer.Argument(help="Keys of states; left out, all that are not pinned.")] = None,
    scope: Annotated[str | None, typer.Option(help="Only states of this scope (cache_scope of jobs).")] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned ones, too.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove KV states from the disk. Workers that run go on: they compute what they miss.

    Example:  cellama cache clear --scope customer-7 --pinned --dir /var/cache/cellama
    """
    if keys and (scope is not None or pinned):
        raise typer.BadParameter("give keys, or --scope and --pinned: keys name what goes, pinned or not")
    cleared = _ask("clear", folder, keys=keys or [], scope=scope, pinned=pinned)
    if json:
        print_json(cleared)
    else:
        out.print(f"removed {cleared['num_states']} states, {readable(cleared['num_bytes'])}")


def cache_pin_command(keys: KeysArgument, folder: FolderOption = None, json: JsonOption = False) -> None:
    """Keep KV states, whatever the quota says, until they are unpinned.

    Example:  cellama cache pin 3f2a90c1d4e5b687 --dir /var/cache/cellama
    """
    _mark("pin", keys, folder, json)


def cache_unpin_command(keys: KeysArgument, folder: FolderOption = None, json: JsonOption = False) -> None:
    """Let pinned KV states go when their time has come.

    Example:  cellama cache unpin 3f2a90c1d4e5b687 --dir /var/cache/cellama
    """
    _mark("unpin", keys, folder, json)


def _mark(what: str, keys: list[str], folder: Path | None, json: bool) -> None:
    done = _ask(what, folder, keys=keys)
    if json:
        print_json(done)
        return
    for key, was_done in done.items():
        out.print(f"{key[:KEY_SHOWN]} {'is' if was_done else 'was not'} {what}ned")


def _folder_of_settings() -> Path:
    named = get_settings().cache_dir
    if named is None:
        raise typer.BadParameter("the settings name no cache_dir; give the folder", param_hint="--dir")
    return Path(named).expanduser()


def _ask(what: str, folder: Path | None, **asked: Any) -> Any:
    """What the engine's own look at the folder says: `api` never imports the engine."""
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
        print_error(answer.get("error") or f"looking at the folder ended with exit code {done.returncode}")
        raise typer.Exit(Exit.FAILED)
    return answer["result"]
