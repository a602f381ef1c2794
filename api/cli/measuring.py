"""The commands `tune` and `bench`, which measure this machine.

Later model loads use the results of `tune`. `tune` and `bench` run the engine in another process, because `api` never
imports the engine.
"""

from __future__ import annotations

import importlib.util
import json as json_module
import os
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from cellama.config import ModelSettings, get_settings
from cellama.config.settings import PlacementSettings
from cellama.tasks.contract.codes import Exit

from .options import JsonOption
from .output import err, out, print_error, print_json
from .services import check_installed

CHOICES = ("n_parallel", "kv_layout", "n_ubatch", "threads")
MEASURED_WITH = (
    *PlacementSettings.model_fields,
    *("flash_attention", "cache_type_k", "cache_type_v"),
    *("n_batch", "chunk_size", "batch_strategy", "pooling"),
)
EXIT_TIMEOUT_S = 10.0  # time for the measuring process to free its model after an interrupt, before it is killed
MAX_OTHER_LOAD = 0.25  # share of the cores; if other programs use more, small differences are not reliable
UNNAMED_ID = "tuned-source"

Row = dict[str, Any]  # as engine/tuning/__main__.py writes it


def tune_command(
    model: Annotated[
        str, typer.Argument(help="Id of a model in the settings, path of a GGUF file, hf://…, or bundled://tiny.")
    ],
    seconds: Annotated[float, typer.Option(min=1, help="Time limit for the measurement, in seconds.")] = 150.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of threads to try (default: all cores).")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Maximum number of slots to try.")] = 64,
    json: JsonOption = False,
) -> None:
    """Find the fastest n_parallel, kv_layout, n_ubatch and threads for a model on this machine.

    Later loads of the model use the result for options set to "auto".

    Example:  cellama tune model.gguf
    """
    check_installed()
    if importlib.util.find_spec("llama_cpp") is None:
        print_error("missing packages: llama_cpp; run `pip install 'cellama[worker]'`")
        raise typer.Exit(Exit.USAGE)
    known = get_settings().models
    settings = next((each for each in known if each.id == model), None) or ModelSettings(id=UNNAMED_ID, source=model)
    end, exit_code = _measure(_request(settings, seconds, threads, slots), shows_rows=not json)
    if "result" not in end:
        print_error(end.get("error") or f"the measuring process exited with code {exit_code}")
        if end.get("code") == "model_load_failed" and settings.id == UNNAMED_ID:
            err.print(f"models in the settings: {', '.join(each.id for each in known)}", markup=False)
        raise typer.Exit(Exit.FAILED)
    result: dict[str, Any] = end["result"]
    if json:
        print_json({"model": model, **result})
    else:
        out.print(_table(result))
        _explain(result, settings)
    if result["problem"]:
        print_error(f"can't save the result: {result['problem']}; set XDG_CACHE_HOME to a writable directory")
        raise typer.Exit(Exit.FAILED)


def _request(model: ModelSettings, seconds: float, threads: int | None, slots: int) -> dict[str, Any]:
    return {
        "source": model.source,
        "options": {name: getattr(model, name) for name in MEASURED_WITH},
        "capabilities": model.capabilities,
        "hub": hub_options(model),
        "seconds": seconds,
        "max_threads": threads,
        "max_slots": slots,
    }


def hub_options(model: ModelSettings) -> dict[str, Any]:
    """Return the settings of a model for downloads from the Hub, as fields of HubOptions."""
    return {
        "cache_dir": model.hub_cache_dir,
        "token": model.hub_token,
        "force": model.hub_force,
        "offline": model.hub_offline,
    }


def _measure(request: dict[str, Any], *, shows_rows: bool) -> tuple[dict[str, Any], int]:
    """Run the measuring process, and return its last message and exit code. On Ctrl-C, print the best result so far."""
    argv = [sys.executable, "-m", "cellama.engine.tuning"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    rows: list[Row] = []
    message: dict[str, Any] = {}
    try:
        process.stdin.write(json_module.dumps(request))  # not as an argument, because it may contain a token of the hub
        process.stdin.close()
        for line in process.stdout:
            message = json_module.loads(line)
            if "row" in message:
                rows.append(message["row"])
                if shows_rows:
                    out.print(_text_of(rows[-1]), markup=False)
    except KeyboardInterrupt:
        process.terminate()
        err.print("interrupted: no result was saved")
        if rows:
            best = max(rows, key=lambda row: float(row["tokens_per_s"]))
            err.print(f"fastest so far: {_text_of(best)}", markup=False)
        raise
    finally:
        try:
            process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return message, process.wait()


def _table(result: dict[str, Any]) -> Table:
    title, names = None, ["threads", "tokens/s"]
    if result["generates"]:
        names = [*CHOICES, "tokens/s", "first token ms"]
        lengths = "{prompt_tokens} prompt tokens and {new_tokens} new tokens".format(**result["work"])
        title = f"32 requests (or two per slot): half with {lengths}, the others up to twice as long"
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in ("", *names):
        table.add_column(column, justify="left" if column in ("", "kv_layout") else "right")
    for row in result["rows"]:
        is_chosen = row["setup"] == result["chosen"]["setup"]
        values = {name: str(value) for name, value in row["setup"].items()}
        values["tokens/s"] = f"{row['tokens_per_s']:.0f}"
        values["first token ms"] = "" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f}"
        style = "bold green" if is_chosen else None
        table.add_row("►" if is_chosen else "", *(values[name] for name in names), style=style)
    return table


def _setup_text(setup: dict[str, Any]) -> str:
    return ", ".join(f"{name} {setup[name]}" for name in CHOICES if setup[name] is not None)


def _text_of(row: Row) -> str:
    first = "" if row["ttft_ms"] is None else f", first token after {row['ttft_ms']:.0f} ms"
    return f"{_setup_text(row['setup'])}: {row['tokens_per_s']:.0f} tokens/s{first}"


def _explain(result: dict[str, Any], settings: ModelSettings) -> None:
    """Print the chosen values, the machine that they apply to, and the settings that override them."""
    machine, chosen = result["machine"], result["chosen"]["setup"]
    if not result["generates"]:
        out.print("an embedding model: only threads were tuned")
    if result["load"] > MAX_OTHER_LOAD:
        out.print(
            f"other programs used {result['load']:.0%} of the cores before the measurement, so the figures are less "
            "reliable"
        )
    if result["num_skipped"]:
        out.print(f"skipped {result['num_skipped']} setups for lack of time; to try more, raise --seconds")
    out.print(f"best: {_setup_text(chosen)}", style="bold", markup=False)
    if result["kept"]:
        where = " + ".join([f"{machine['cpu']}, {machine['cores']} cores", *machine["gpus"]])
        text = f"saved for {where}, llama-cpp-python {machine['llama_cpp']}: {result['kept']}"
        out.print(text, markup=False, soft_wrap=True)
    fixed = [name for name in CHOICES if chosen[name] is not None and getattr(settings, name) not in (None, "auto")]
    if fixed:
        values = ", ".join(f"{name} = {getattr(settings, name)}" for name in fixed)
        out.print(f'the settings of {settings.id} have {values}; set them to "auto" to use the result', markup=False)


def bench_command(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Name of the benchmark (default: list the benchmarks).", show_default=False)
    ] = "",
) -> None:
    """Run a benchmark on this machine, and print a table and one line of JSON.

    Example:  cellama bench server_concurrent --model model.gguf
    """
    if name in ("--help", "-h"):
        typer.echo(context.get_help())
        return
    missing = [module for module in ("llama_cpp", "gguf") if importlib.util.find_spec(module) is None]
    if missing:
        print_error(f"missing packages: {', '.join(missing)}; run `pip install 'cellama[worker,bench]'`")
        raise typer.Exit(Exit.USAGE)
    arguments = [name, *context.args] if name else ["--help"]
    # The benchmark replaces this process, so that it receives Ctrl-C itself and can remove its workers and files.
    os.execv(sys.executable, [sys.executable, "-m", "cellama.bench", *arguments])
