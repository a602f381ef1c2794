"""`cellama models plan`: show on which devices a model would be placed, and how much memory it would need.

The plan is made in another process, because `api` never imports the engine.
"""

from __future__ import annotations

import importlib.util
import json as json_module
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from cellama.config import ModelSettings, get_settings
from cellama.config.model_ids import id_of_source
from cellama.tasks.contract.codes import Exit

from .measuring import hub_options
from .models import options_of_call
from .options import JsonOption
from .output import out, print_error, print_json, readable, table_of

SIZES = {"weights_bytes": "weights", "kv_bytes": "KV cache", "compute_bytes": "compute", "saved_bytes": "saved"}


def models_plan_command(
    model: Annotated[
        str, typer.Argument(help="Id of a model in the settings, path of a GGUF file, hf://…, or bundled://tiny.")
    ],
    option: Annotated[
        list[str] | None,
        typer.Option("--set", help="Model option as NAME=VALUE, with the names used in cellama.toml. Can be repeated."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show the devices and the memory that a model would use on this machine, without loading it.

    The exit code is 1 if the model does not fit into the memory budget.

    Example:  cellama models plan /models/big.gguf --set n_parallel=16
    """
    if importlib.util.find_spec("llama_cpp") is None:
        print_error("missing packages: llama_cpp; run `pip install 'cellama[worker]'`")
        raise typer.Exit(Exit.USAGE)
    answer = _plan(_settings_of(model, options_of_call(option or [])))
    if "plan" not in answer:
        print_error(answer.get("error") or "the planning process failed without an error message")
        raise typer.Exit(Exit.FAILED)
    plan: dict[str, Any] = answer["plan"]
    if json:
        print_json(plan)
    else:
        _print(plan)
    if not plan["fits"]:
        raise typer.Exit(Exit.FAILED)


def _settings_of(model: str, options: dict[str, Any]) -> ModelSettings:
    """Return the settings of a model with this id, or of a file, with the options of the call."""
    known = next((each for each in get_settings().models if each.id == model), None)
    given = {"id": id_of_source(model), "source": model} if known is None else known.model_dump(exclude_unset=True)
    return ModelSettings.model_validate({**given, **options})


def _plan(model: ModelSettings) -> dict[str, Any]:
    """Run the planning process, and return its answer."""
    request = {
        "id": model.id,
        "source": model.source,
        "options": model.model_dump(),
        "capabilities": model.capabilities,
        "hub": hub_options(model),
        "memory_budget": get_settings().memory_budget,
    }
    argv = [sys.executable, "-m", "cellama.engine.models"]
    # Not as an argument, because the request may contain a token of the Hub.
    done = subprocess.run(argv, input=json_module.dumps(request), stdout=subprocess.PIPE, text=True, check=False)
    answer: dict[str, Any] = json_module.loads(done.stdout) if done.stdout else {}
    return answer


def _print(plan: dict[str, Any]) -> None:
    context = f" of {plan['ctx_per_slot']} tokens" if plan["ctx_per_slot"] else ""
    layers = f"{plan['n_gpu_layers']} of {plan['num_layers']} layers on GPUs"
    out.print(f"[bold]{escape(plan['model'])}[/]: {plan['n_parallel']} slots{context}, {layers}")
    out.print(_table(plan))
    if plan["fits"]:
        out.print("The model fits into the memory budget.")
    else:
        shortage = plan["shortage"]
        out.print(
            f"[bold red]The model does not fit:[/] it needs {readable(shortage['required_bytes'])} on "
            f"{escape(shortage['device'])}, but only {readable(shortage['available_bytes'])} are available. Lower "
            "n_parallel, ctx_per_slot or cache_ram_bytes, or use a smaller cache type."
        )


def _table(plan: dict[str, Any]) -> Table:
    columns = ("layers", *SIZES.values(), "total", "available")
    table = table_of("device", *columns, right=", ".join(columns))
    for device in plan["devices"]:
        sizes = [readable(device[name]) for name in (*SIZES, "total_bytes")]
        available = "" if device["available_bytes"] is None else readable(device["available_bytes"])
        label = f"{escape(device['name'])} [dim]{escape(device['description'])}[/]"
        table.add_row(label, str(device["layers"]), *sizes, available)
    return table
