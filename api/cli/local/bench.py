"""`cellama bench`: the benchmarks, in a process of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Annotated

import typer

from cellama.api.cli.output import print_error
from cellama.tasks.contract.codes import Exit


def bench_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which one; without a name they are listed.", show_default=False)] = "",
) -> None:
    """Run a benchmark of the engine on this machine: a table, and one JSON line.

    Example:  cellama bench single_generate --model model.gguf
    """
    if name in ("--help", "-h"):
        typer.echo(context.get_help())
        return
    missing = [module for module in ("llama_cpp", "gguf") if importlib.util.find_spec(module) is None]
    if missing:
        print_error(f"benchmarks need {' and '.join(missing)}; `pip install 'cellama[worker,bench]'`")
        raise typer.Exit(Exit.USAGE)
    arguments = [name, *context.args] if name else ["--help"]
    done = subprocess.run([sys.executable, "-m", "cellama.bench", *arguments], check=False)
    raise typer.Exit(done.returncode)
