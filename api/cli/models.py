"""`cellama models`: list, load and unload models and their adapters on running workers."""

from __future__ import annotations

import contextlib
import json as json_module
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from cellama.api.client.client import (
    ADAPTER_LOAD_TIMEOUT_S,
    ADAPTER_UNLOAD_TIMEOUT_S,
    EVICT_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    UNLOAD_TIMEOUT_S,
    Client,
)
from cellama.tasks.contract.errors import InvalidJob, UnknownModel
from cellama.tasks.contract.shapes.workers import DeviceUse, LoadFailure, MemoryView, ModelView

from .options import JsonOption
from .output import NO_WORKERS, err, out, print_json, readable, readable_time, table_of

WorkerOption = Annotated[str | None, typer.Option("--worker", "-w", help="Apply the command only to this worker.")]
PoolOption = Annotated[
    str | None,
    typer.Option(
        "--pool",
        help="Apply the command to all workers in this pool, including workers that join later (default: all pools).",
    ),
]
NameArgument = Annotated[str, typer.Argument(help="Adapter name.")]
IdArgument = Annotated[str, typer.Argument(help="Model id.")]
SHOWN_FINGERPRINT_DIGITS = 16  # --json prints all digits


def models_list_command(json: JsonOption = False) -> None:
    """List the models that running workers are serving or loading.

    Example:  cellama models list
    """
    with Client() as client:
        models = client.models()
    if json:
        print_json(models)
        return
    if not models:
        out.print(NO_WORKERS)
        return
    table = table_of("model", "status", "for", "file", "memory", "workers")
    for model in models:
        label = model["id"] + (" [dim](default)[/]" if model["default"] else "")
        file, memory = "", ""
        if "n_params" in model:
            file = f"{model['architecture']} {num_params(model['n_params'])} {model['file_type']}"
            memory = f"{readable(model['memory_bytes'])} [dim]{model['backend']}[/]"
        workers = "\n".join(model["workers"])
        table.add_row(label, model["status"], ", ".join(model["capabilities"]), file, memory, workers)
    out.print(table)
    for model in models:
        for worker, why in model["lacks"].items():
            out.print(f"[yellow]{escape(model['id'])} is missing on {escape(worker)}: {escape(why['message'])}[/]")


def models_info_command(model_id: IdArgument, json: JsonOption = False) -> None:
    """Show a model's file, options and memory use.

    Example:  cellama models info tiny
    """
    with Client() as client:
        models = {model["id"]: model for model in client.models()}
    if model_id not in models:
        raise UnknownModel(f"no running worker serves the model {model_id!r}; models: {', '.join(models) or 'none'}")
    if json:
        print_json(models[model_id])
    else:
        out.print(render_info(models[model_id]))


def models_memory_command(worker: WorkerOption = None, json: JsonOption = False) -> None:
    """Show the devices and the memory budget of each worker, and the memory use of each model.

    Example:  cellama models memory
    """
    with Client() as client:
        workers = client.memory(worker)
    if json:
        print_json(workers)
    elif not workers:
        out.print(NO_WORKERS)
    else:
        out.print(render_memory(workers))


def models_load_command(
    model: Annotated[str, typer.Argument(help="Model id (default: derived from SOURCE).")],
    source: Annotated[
        str | None, typer.Argument(help="Path of a GGUF file on the workers, hf://…, or bundled://tiny.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", help="Model option as NAME=VALUE, with the names used in cellama.toml. Can be repeated."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Make this model the default model (`:default`).")] = False,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[float, typer.Option(help="Timeout in seconds for loading the model.")] = LOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Load a model on running workers, which continue to serve other models.

    Example:  cellama models load big /models/big.gguf --set n_parallel=16
    """
    options = options_of_call(option or [])
    given_id, source = (None, model) if source is None else (model, source)
    target: dict[str, Any] = {"worker": worker, "pool": pool}
    with Client() as client, _loading(model, f"cellama models unload {given_id or 'ID'}"):
        model_id = client.load_model(given_id, source, default=default, timeout=timeout, **target, **options)
        failures = _failures(client, model_id)
    _report(json, {"model": model_id, "status": "ready", "not_on": failures}, f"model {model_id} is ready", failures)


def models_unload_command(
    model_id: IdArgument,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[
        float, typer.Option(help="Time in seconds to wait for running jobs to finish.")
    ] = UNLOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Unload a model from running workers after its running jobs have finished.

    Example:  cellama models unload big
    """
    with Client() as client, err.status(f"unloading {model_id} …"):
        client.unload_model(model_id, worker=worker, pool=pool, timeout=timeout)
        failures = _failures(client, model_id)
    value = {"model": model_id, "status": "unloaded", "not_on": failures}
    _report(json, value, f"model {model_id} is unloaded", failures)


def models_evict_command(
    model_id: IdArgument,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[float, typer.Option(help="Timeout in seconds for writing KV states to disk.")] = EVICT_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Evict a model's KV states from idle slots and RAM, and write valuable states to disk. Jobs continue.

    Example:  cellama models evict tiny
    """
    with Client() as client, err.status(f"evicting the KV states of {model_id} …"):
        client.evict(model_id, worker=worker, pool=pool, timeout=timeout)
    _report(json, {"model": model_id, "status": "evicted"}, f"evicted the KV states of {model_id}")


def models_default_command(
    model_id: IdArgument, worker: WorkerOption = None, pool: PoolOption = None, json: JsonOption = False
) -> None:
    """Make a model the default model, which runs jobs for `:default`.

    Example:  cellama models default big
    """
    with Client() as client:
        client.set_default_model(model_id, worker=worker, pool=pool)
    _report(json, {"default": model_id}, f"model {model_id} is the default model")


def models_adapters_command(model_id: IdArgument, json: JsonOption = False) -> None:
    """List a model's LoRA adapters.

    Example:  cellama models adapters tiny
    """
    with Client() as client:
        adapters = client.adapters(model_id)
    if json:
        print_json(adapters)
        return
    if not adapters:
        out.print(
            f"model {model_id} has no adapters; load one with `cellama models adapter load {model_id} NAME SOURCE`"
        )
        return
    table = table_of("adapter", "scale", "status", "in use", "source", "SHA-256", "workers", right="in use")
    for adapter in adapters:
        table.add_row(
            adapter["name"],
            f"{adapter['scale']:g}" if adapter["scale"] else "0 [dim](on request)[/]",
            adapter["status"],
            str(adapter["in_use"]),
            adapter["source"],
            adapter["fingerprint"][:12],
            "\n".join(adapter["workers"]),
        )
    out.print(table)


def adapter_load_command(
    model_id: IdArgument,
    name: NameArgument,
    source: Annotated[str, typer.Argument(help="Path of the adapter's GGUF file on the workers, or hf://….")],
    scale: Annotated[
        float,
        typer.Option(
            help="Scale for jobs that don't choose adapters. If 0, only jobs that request the adapter use it."
        ),
    ] = 1.0,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[
        float, typer.Option(help="Timeout in seconds for loading the adapter.")
    ] = ADAPTER_LOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Load a LoRA adapter for a model. Running jobs continue.

    Example:  cellama models adapter load tiny pirate /models/pirate.gguf
    """
    with Client() as client, _loading(name, f"cellama models adapter unload {model_id} {name}"):
        client.load_adapter(model_id, name, source, scale=scale, worker=worker, pool=pool, timeout=timeout)
        failures = _failures(client, model_id, name)
    usage = f"new jobs use it with scale {scale:g}" if scale else f"jobs with --adapter {name} use it"
    value = {"model": model_id, "adapter": name, "scale": scale, "status": "ready", "not_on": failures}
    _report(json, value, f"adapter {name} is ready; {usage}", failures)


def adapter_scale_command(
    model_id: IdArgument,
    name: NameArgument,
    scale: Annotated[
        float,
        typer.Argument(
            help="Scale for jobs that don't choose adapters. If 0, only jobs that request the adapter use it."
        ),
    ],
    worker: WorkerOption = None,
    pool: PoolOption = None,
    json: JsonOption = False,
) -> None:
    """Change an adapter's scale for new jobs.

    Example:  cellama models adapter scale tiny pirate 0.5
    """
    with Client() as client:
        client.set_adapter_scale(model_id, name, scale, worker=worker, pool=pool)
    value = {"model": model_id, "adapter": name, "scale": scale}
    _report(json, value, f"new jobs of {model_id} use {name} with scale {scale:g}")


def adapter_unload_command(
    model_id: IdArgument,
    name: NameArgument,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[
        float, typer.Option(help="Time in seconds to wait for jobs that use the adapter to finish.")
    ] = ADAPTER_UNLOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Unload an adapter after the jobs that use it have finished.

    Example:  cellama models adapter unload tiny pirate
    """
    with Client() as client, err.status(f"unloading {name} …"):
        client.unload_adapter(model_id, name, worker=worker, pool=pool, timeout=timeout)
        failures = _failures(client, model_id, name)
    value = {"model": model_id, "adapter": name, "status": "unloaded", "not_on": failures}
    _report(json, value, f"adapter {name} is unloaded", failures)


@contextlib.contextmanager
def _loading(name: str, undo: str) -> Iterator[None]:
    """Show that loading is in progress.

    After Ctrl-C, explain that the workers continue to load the model or adapter.
    """
    try:
        with err.status(f"loading {name} …"):
            yield
    except KeyboardInterrupt:
        err.print(f"\n[yellow]workers continue to load {name}; to unload it afterwards: {undo}[/]", soft_wrap=True)
        raise


def options_of_call(given: list[str]) -> dict[str, Any]:
    """Parse options given as NAME=VALUE. Values that are not valid JSON are treated as text."""
    options: dict[str, Any] = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not equals:
            raise InvalidJob(f"--set: {entry!r} is not NAME=VALUE; use, for example, --set n_parallel=16")
        try:
            options[name] = json_module.loads(text)
        except ValueError:
            options[name] = text
    return options


def _failures(client: Client, model_id: str, adapter: str | None = None) -> dict[str, LoadFailure]:
    """Return the errors of workers that could not load or unload the model or adapter, keyed by worker."""
    found = {worker.name: thing for worker in client.workers() for thing in worker.wanted if thing["model"] == model_id}
    return {name: thing["why"] for name, thing in found.items() if thing["adapter"] == adapter and thing["why"]}


def _report(json: bool, value: dict[str, Any], text: str, failures: dict[str, LoadFailure] | None = None) -> None:
    """Print the outcome. `failures` maps the workers on which the command has failed so far to their errors."""
    if json:
        print_json(value)
        return
    out.print(text)
    for worker, failure in (failures or {}).items():
        err.print(f"[yellow]failed on {escape(worker)}, which retries: {escape(failure['message'])}[/]")


# Rendering of models and their memory


def num_params(count: int) -> str:
    """Return a parameter count as text, for example "3.9 M" or "7.2 B"."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def render_info(model: ModelView) -> RenderableType:
    """Return the model description that `cellama models info` prints."""
    grid = Table.grid(padding=(0, 2))
    for name, value in _facts(model).items():
        grid.add_row(f"[dim]{name}[/]", value)
    title = f"[bold]{model['id']}[/]  {_status(model)}"
    if "memory" not in model:
        return Group(title, Padding(grid, (0, 0, 0, 2)))
    return Group(title, Padding(grid, (0, 0, 0, 2)), Padding(_usage_table(model["memory"]), (1, 0, 0, 2)))


def _facts(model: ModelView) -> dict[str, str]:
    facts = {"source": model["source"], "for": ", ".join(model["capabilities"])}
    if "n_params" in model:
        facts |= {
            "architecture": f"{model['architecture']}, {num_params(model['n_params'])} parameters",
            "file type": f"{model['file_type']}, {readable(model['size_bytes'])}",
            "fingerprint": f"{model['fingerprint'][:SHOWN_FINGERPRINT_DIGITS]}…",
            "backend": model["backend"],
            "context": _context(model),
            "loaded": f"{readable_time(model['ready_at'])}, within {model['load_s']:.2f} s",
            "last used": readable_time(model["last_used_at"]),
        }
    if model.get("sampling"):
        facts["sampling"] = ", ".join(f"{name} {value}" for name, value in model["sampling"].items())
    if model.get("tuned"):
        facts["tuned"] = ", ".join(f"{name} {value}" for name, value in model["tuned"].items())
    if model.get("adapters"):
        facts["adapters"] = ", ".join(f"{adapter['name']} × {adapter['scale']:g}" for adapter in model["adapters"])
    return {**facts, "workers": "\n".join(model["workers"])}


def _context(model: ModelView) -> str:
    trained = f"trained for {model['n_ctx_train']}"
    if not model["slots"]:
        return f"no slots ({trained} tokens)"
    return f"{model['slots']} slots of {model['ctx_per_slot']} tokens ({trained})"


def _status(model: ModelView) -> str:
    colour = {"ready": "green", "available": "green", "loading": "yellow"}.get(model["status"], "red")
    return f"[{colour}]{model['status']}[/]" + ("  [dim](default)[/]" if model["default"] else "")


def _usage_table(memory: dict[str, DeviceUse]) -> Table:
    sizes = ("weights", "KV cache", "compute", "saved", "total")
    table = table_of("memory on", *sizes, right=", ".join(sizes))
    for device, usage in memory.items():
        table.add_row(device, *(readable(size) for size in _sizes(usage)))
    return table


def _sizes(usage: DeviceUse) -> list[int]:
    sizes = [usage["weights_bytes"], usage["kv_bytes"], usage["compute_bytes"], usage["saved_bytes"]]
    return [*sizes, sum(sizes)]


def render_memory(workers: Sequence[MemoryView]) -> RenderableType:
    """Return one table per worker, with the worker's devices and each device's models below it."""
    return Group(*(_worker_table(worker) for worker in workers))


def _worker_table(worker: MemoryView) -> Table:
    budget = worker["budget"] if isinstance(worker["budget"], str) else readable(worker["budget"])
    used = readable(sum(model.get("memory_bytes", 0) for model in worker["models"]))
    title = f"{worker['worker']}  [dim]models use {used}; memory_budget {budget}, on_full {worker['on_full']}[/]"
    sizes = ("size", "free", "weights", "KV cache", "compute", "saved", "total")
    table = table_of("device, models", *sizes, right=", ".join(sizes), title=title)
    for device in worker["devices"]:
        label = f"{device['name']} [dim]{device['description']}[/]"
        table.add_row(label, readable(device["total_bytes"]), readable(device["free_bytes"]))
        for model in worker["models"]:
            usage = model.get("memory", {}).get(device["name"])
            if usage:
                table.add_row(f"  {model['id']}", "", "", *(readable(size) for size in _sizes(usage)))
    vram = worker.get("vram")
    table.caption, table.caption_justify = "no GPU: llama.cpp is built for the CPU only, or found no GPU", "left"
    if vram is not None:
        used, total = readable(vram["used_bytes"]), readable(vram["total_bytes"])
        table.caption = f"all GPUs: {used} of {total} used"
    return table
