"""`cellama bench`: the benchmarks, which `api` never imports."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Annotated

import typer

from cellama.tasks.contract.codes import Exit

from .output import print_error


def bench_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which one; without a name they are listed.", show_default=False)] = "",
) -> None:
    """Run a benchmark of the engine on this machine: a table, and one JSON line.

    Example:  cellama bench server_concurrent --model model.gguf
    """
    if name in ("--help", "-h"):
        typer.echo(context.get_help())
        return
    missing = [module for module in ("llama_cpp", "gguf") if importlib.util.find_spec(module) is None]
    if missing:
        print_error(f"benchmarks need {' and '.join(missing)}; `pip install 'cellama[worker,bench]'`")
        raise typer.Exit(Exit.USAGE)
    arguments = [name, *context.args] if name else ["--help"]
    # In the place of this process: Ctrl-C reaches what has workers and files to clear away, and nothing ends it early.
    os.execv(sys.executable, [sys.executable, "-m", "cellama.bench", *arguments])
