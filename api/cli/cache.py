"""`cellama cache`: list and remove KV states on disk, and explain how much of a job's prompt was reused.

All commands except `explain` need neither a worker nor Redis.
"""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from cellama.api.client.client import Client
from cellama.config import get_settings
from cellama.tasks.contract.codes import Exit

from .options import JsonOption
from .output import out, plural, print_error, print_json, readable, readable_time, table_of
from .services import check_installed

SHOWN_DIGITS = 16  # characters of a key in a table, enough to be unique. --json prints all digits.
DirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--dir", help="Directory that contains the KV states (default: the cache_dir setting).", show_default=False
    ),
]
KeysArgument = Annotated[list[str], typer.Argument(help="Keys of KV states, or prefixes with at least 8 hex digits.")]


def cache_list_command(directory: DirectoryOption = None, json: JsonOption = False) -> None:
    """List the KV states on disk, most recently used first.

    Example:  cellama cache list --dir /var/cache/cellama
    """
    states = _run("list", directory)
    if json:
        print_json(states)
        return
    if not states:
        out.print("no KV states" + (f" in {escape(str(directory))}" if directory else ""))
        return
    table = table_of("key", "model", "scope", "tokens", "size", "last used", "", right="tokens, size")
    for state in states:
        note = f"[red]{state['problem']}[/]" if state["problem"] else "pinned" * state["is_pinned"]
        table.add_row(
            state["key"][:SHOWN_DIGITS],
            state["identity"][:8],
            escape(state["scope"]),
            str(state["num_tokens"] or ""),
            readable(state["num_bytes"]),
            readable_time(state["last_used"]),
            note,
        )
    out.print(table)


def cache_info_command(directory: DirectoryOption = None, json: JsonOption = False) -> None:
    """Show the number and total size of the KV states on disk.

    Example:  cellama cache info --json --dir /var/cache/cellama
    """
    info = _run("info", directory)
    if json:
        print_json(info)
        return
    states, models = plural(info["num_states"], "state"), plural(info["num_identities"], "model")
    out.print(f"{info['folder']}: {states} of {models}", markup=False)
    pinned = f", of which {readable(info['pinned_bytes'])} ({plural(info['num_pinned'], 'state')}) are pinned"
    out.print(f"{readable(info['num_bytes'])}{pinned if info['num_pinned'] else ''}")
    if info["free_bytes"] is not None:
        out.print(f"{readable(info['free_bytes'])} free on the disk")


def cache_clear_command(
    directory: DirectoryOption = None,
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys of KV states (default: all states that are not pinned).")
    ] = None,
    scope: Annotated[
        str | None, typer.Option(help="Remove only states with this scope (the cache_scope of the jobs).")
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Also remove pinned states.")] = False,
    json: JsonOption = False,
) -> None:
    """Delete KV states from disk.

    Running workers are not interrupted. Workers recompute deleted states when jobs need them.

    Example:  cellama cache clear --scope customer-7 --dir /var/cache/cellama
    """
    if keys and (scope is not None or pinned):
        raise typer.BadParameter(
            "KEYS can't be combined with --scope and --pinned; states given by key are removed even if they are pinned"
        )
    cleared = _run("clear", directory, keys=keys or [], scope=scope, pinned=pinned)
    if json:
        print_json(cleared)
    else:
        out.print(f"removed {plural(cleared['num_states'], 'state')} ({readable(cleared['num_bytes'])})")


def cache_explain_command(
    job_id: Annotated[str, typer.Argument(help="Id of a finished job or of a gateway response.")],
    json: JsonOption = False,
) -> None:
    """Show how much of a job's prompt was reused, and where the prompt differs from the conversation's earlier turns.

    Example:  cellama cache explain msg_5f0c…
    """
    with Client() as client:
        found = client.explain_cache(job_id)
    if json:
        print_json(asdict(found))
        return
    place = {"device": "a slot", "ram": "RAM", "disk": "disk"}.get(found.tier or "", "")
    reused = f"{found.reused_tokens} of {plural(found.prompt_tokens, 'prompt token')} were reused"
    out.print(reused + (f" from {place}" if place else ""), markup=False)
    if found.replayed_messages:
        out.print(f"the first {plural(found.replayed_messages, 'message')} kept the tokens of the earlier turns")
    at = "" if found.message is None else f"messages.{found.message}: "
    for number, reason in enumerate(found.reasons):
        out.print(f"{'' if number else at}{reason}", markup=False)
    if found.difference is not None:
        out.print(f"the prompt differs from the latest turn at token {found.difference.token}")
        for name in ("common", "earlier", "prompt"):
            text = getattr(found.difference, name)
            out.print(f"  {name:8} {'(no worker has the model)' if text is None else repr(text)}", markup=False)


def cache_pin_command(keys: KeysArgument, directory: DirectoryOption = None, json: JsonOption = False) -> None:
    """Pin KV states so that they are never evicted to meet the quota.

    Example:  cellama cache pin 3f2a90c1d4e5b687 --dir /var/cache/cellama
    """
    _set_pinned("pin", keys, directory, json)


def cache_unpin_command(keys: KeysArgument, directory: DirectoryOption = None, json: JsonOption = False) -> None:
    """Unpin KV states so that they may be evicted to meet the quota.

    Example:  cellama cache unpin 3f2a90c1d4e5b687 --dir /var/cache/cellama
    """
    _set_pinned("unpin", keys, directory, json)


def _set_pinned(command: str, keys: list[str], directory: Path | None, json: bool) -> None:
    changed = _run(command, directory, keys=keys)
    if json:
        print_json(changed)
        return
    for key, is_changed in changed.items():
        out.print(f"{key[:SHOWN_DIGITS]} {'is' if is_changed else 'was not'} {command}ned")


def _default_directory() -> Path:
    cache_dir = get_settings().cache_dir
    if cache_dir is None:
        raise typer.BadParameter("the cache_dir setting is not set; pass the directory with --dir", param_hint="--dir")
    return Path(cache_dir).expanduser()


def _run(command: str, directory: Path | None, **options: Any) -> Any:
    """Run a command of `python -m cellama.engine.kvstore` and return its result.

    The command runs in a separate process because `api` never imports the engine.
    """
    check_installed()
    request = {
        "do": command,
        "folder": str(directory or _default_directory()),
        "keys": [],
        "scope": None,
        "pinned": False,
        **options,
    }
    argv = [sys.executable, "-m", "cellama.engine.kvstore"]
    done = subprocess.run(argv, input=json_module.dumps(request), stdout=subprocess.PIPE, text=True, check=False)
    reply = json_module.loads(done.stdout or "{}")
    if "result" not in reply:
        print_error(reply.get("error") or f"the cache process exited with code {done.returncode}")
        raise typer.Exit(Exit.FAILED)
    return reply["result"]
