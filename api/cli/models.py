"""The commands for models and their adapters on running workers."""

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

from .generation import JsonOption
from .output import err, out, print_json, readable, readable_time, table_of

WorkerOption = Annotated[str | None, typer.Option("--worker", "-w", help="Name of one worker, instead of a pool.")]
PoolOption = Annotated[
    str | None, typer.Option("--pool", help="Name of a pool (default: all). It includes workers that join later.")
]
NameArgument = Annotated[str, typer.Argument(help="Name of the adapter.")]
IdArgument = Annotated[str, typer.Argument(help="Id of the model.")]
FINGERPRINT_SHOWN = 16  # digits; --json has all


def models_list_command(json: JsonOption = False) -> None:
    """List the models that live workers have or are loading.

    Example:  cellama models list
    """
    with Client() as client:
        models = client.models()
    if json:
        print_json(models)
        return
    if not models:
        out.print("no worker is running; start one with `cellama up` or `cellama worker`")
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
            out.print(f"[yellow]{escape(worker)} lacks {escape(model['id'])}: {escape(why['message'])}[/]")


def models_info_command(model_id: IdArgument, json: JsonOption = False) -> None:
    """Show a model: its file, how it is loaded, and the memory that it takes.

    Example:  cellama models info tiny
    """
    with Client() as client:
        models = {model["id"]: model for model in client.models()}
    if model_id not in models:
        raise UnknownModel(f"no live worker has a model {model_id!r}; there are: {', '.join(models) or 'none'}")
    if json:
        print_json(models[model_id])
    else:
        out.print(render_info(models[model_id]))


def models_memory_command(worker: WorkerOption = None, json: JsonOption = False) -> None:
    """Show the memory of each worker's devices, its budget, and what each model takes of it.

    Example:  cellama models memory
    """
    with Client() as client:
        workers = client.memory(worker)
    if json:
        print_json(workers)
    elif not workers:
        out.print("no worker is running; start one with `cellama up` or `cellama worker`")
    else:
        out.print(render_memory(workers))


def models_load_command(
    model: Annotated[str, typer.Argument(help="Id of the model (default: made from the source).")],
    source: Annotated[
        str | None, typer.Argument(help="Path of a GGUF file as the workers see it, hf://…, or bundled://tiny.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting as NAME=VALUE, as in cellama.toml. May be given more than once."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Serve `:default` from this model.")] = False,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[float, typer.Option(help="Timeout in seconds until the model takes jobs.")] = LOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Load a model on running workers. Other models are served meanwhile.

    Example:  cellama models load big /models/big.gguf --set n_parallel=16
    """
    options = _options(option or [])
    given, source = (None, model) if source is None else (model, source)
    whom: dict[str, Any] = {"worker": worker, "pool": pool}
    with Client() as client, _loading(model, f"cellama models unload {given or 'ID'}"):
        model_id = client.load_model(given, source, default=default, timeout=timeout, **whom, **options)
        but = _not_so_on(client, model_id)
    _say(json, {"model": model_id, "status": "ready", "not_on": but}, f"model {model_id} takes jobs", but)


def models_unload_command(
    model_id: IdArgument,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[
        float, typer.Option(help="Timeout in seconds for its running jobs to finish.")
    ] = UNLOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Unload a model from running workers after its jobs have ended.

    Example:  cellama models unload big
    """
    with Client() as client, err.status(f"unloading {model_id} …"):
        client.unload_model(model_id, worker=worker, pool=pool, timeout=timeout)
        but = _not_so_on(client, model_id)
    _say(json, {"model": model_id, "status": "unloaded", "not_on": but}, f"model {model_id} is unloaded", but)


def models_evict_command(
    model_id: IdArgument,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[float, typer.Option(help="Timeout in seconds for saving the KV states.")] = EVICT_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Evict the KV states of a model from idle slots and RAM. Those that are worth it go to disk. Jobs continue.

    Example:  cellama models evict tiny
    """
    with Client() as client, err.status(f"emptying the cache of {model_id} …"):
        client.evict(model_id, worker=worker, pool=pool, timeout=timeout)
    _say(json, {"model": model_id, "status": "evicted"}, f"the cache of {model_id} is empty")


def models_default_command(
    model_id: IdArgument, worker: WorkerOption = None, pool: PoolOption = None, json: JsonOption = False
) -> None:
    """Serve jobs for `:default` from a model.

    Example:  cellama models default big
    """
    with Client() as client:
        client.set_default_model(model_id, worker=worker, pool=pool)
    _say(json, {"default": model_id}, f"model {model_id} serves :default")


def models_adapters_command(model_id: IdArgument, json: JsonOption = False) -> None:
    """List the LoRA adapters of a model.

    Example:  cellama models adapters tiny
    """
    with Client() as client:
        adapters = client.adapters(model_id)
    if json:
        print_json(adapters)
        return
    if not adapters:
        out.print(f"model {model_id} has no adapters; load one with `cellama models adapter load {model_id} NAME FILE`")
        return
    table = table_of("adapter", "scale", "status", "in use", "source", "SHA-256", "workers", right="in use")
    for a in adapters:
        scale = f"{a['scale']:g}" if a["scale"] else "0 [dim](on request)[/]"
        numbers = (scale, a["status"], str(a["in_use"]))
        table.add_row(a["name"], *numbers, a["source"], a["fingerprint"][:12], "\n".join(a["workers"]))
    out.print(table)


def adapter_load_command(
    model_id: IdArgument,
    name: NameArgument,
    source: Annotated[str, typer.Argument(help="Path of the adapter's GGUF file as the workers see it, or hf://….")],
    scale: Annotated[
        float, typer.Option(help="Scale for jobs that do not choose one. 0: only jobs that choose it have the adapter.")
    ] = 1.0,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[float, typer.Option(help="Timeout in seconds until jobs can use it.")] = ADAPTER_LOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Load a LoRA adapter for a model. Jobs continue meanwhile.

    Example:  cellama models adapter load tiny pirate /models/pirate.gguf --scale 0
    """
    with Client() as client, _loading(name, f"cellama models adapter unload {model_id} {name}"):
        client.load_adapter(model_id, name, source, scale=scale, worker=worker, pool=pool, timeout=timeout)
        but = _not_so_on(client, model_id, name)
    whose = f"all its jobs have it with scale {scale:g}" if scale else f"jobs with --adapter {name} have it"
    loaded = {"model": model_id, "adapter": name, "scale": scale, "status": "ready", "not_on": but}
    _say(json, loaded, f"{name} is loaded: {whose}", but)


def adapter_scale_command(
    model_id: IdArgument,
    name: NameArgument,
    scale: Annotated[
        float,
        typer.Argument(help="Scale for jobs that do not choose one. 0: only jobs that choose it have the adapter."),
    ],
    worker: WorkerOption = None,
    pool: PoolOption = None,
    json: JsonOption = False,
) -> None:
    """Change the scale of an adapter for new jobs.

    Example:  cellama models adapter scale tiny pirate 0.5
    """
    with Client() as client:
        client.set_adapter_scale(model_id, name, scale, worker=worker, pool=pool)
    _say(json, {"model": model_id, "adapter": name, "scale": scale}, f"new jobs of {model_id} have {name} × {scale:g}")


def adapter_unload_command(
    model_id: IdArgument,
    name: NameArgument,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[
        float, typer.Option(help="Timeout in seconds for jobs that use it to finish.")
    ] = ADAPTER_UNLOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Unload an adapter after the jobs that have it have ended.

    Example:  cellama models adapter unload tiny pirate
    """
    with Client() as client, err.status(f"unloading {name} …"):
        client.unload_adapter(model_id, name, worker=worker, pool=pool, timeout=timeout)
        but = _not_so_on(client, model_id, name)
    unloaded = {"model": model_id, "adapter": name, "status": "unloaded", "not_on": but}
    _say(json, unloaded, f"adapter {name} is unloaded", but)


@contextlib.contextmanager
def _loading(name: str, undo: str) -> Iterator[None]:
    """Explain after Ctrl-C that workers continue to load, because others may wait for that too."""
    try:
        with err.status(f"loading {name} …"):
            yield
    except KeyboardInterrupt:
        err.print(f"\n[yellow]the workers continue to load {name}; `{undo}` unloads it afterwards[/]", soft_wrap=True)
        raise


def _options(given: list[str]) -> dict[str, Any]:
    """Return options given as NAME=VALUE. Values are JSON, or else text."""
    options: dict[str, Any] = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not equals:
            raise InvalidJob(f"--set {entry!r} is not NAME=VALUE; write, for example, --set n_parallel=16")
        try:
            options[name] = json_module.loads(text)
        except ValueError:
            options[name] = text
    return options


def _not_so_on(client: Client, model_id: str, adapter: str | None = None) -> dict[str, LoadFailure]:
    """Return, by worker, why it could not load or unload what others did."""
    found = {worker.name: thing for worker in client.workers() for thing in worker.wanted if thing["model"] == model_id}
    return {name: thing["why"] for name, thing in found.items() if thing["adapter"] == adapter and thing["why"]}


def _say(json: bool, value: dict[str, Any], text: str, but: dict[str, LoadFailure] | None = None) -> None:
    """Report what was done. `but` has the workers that could not do it yet, with the reason."""
    if json:
        print_json(value)
        return
    out.print(text)
    for worker, failure in (but or {}).items():
        err.print(f"[yellow]but not on {escape(worker)}, which retries: {escape(failure['message'])}[/]")


# How models and their memory look on a terminal


def num_params(count: int) -> str:
    """Return a number of parameters as text, for example "3.9 M" or "7.2 B"."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def render_info(model: ModelView) -> RenderableType:
    """Return what `models info` shows."""
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
            "fingerprint": f"{model['fingerprint'][:FINGERPRINT_SHOWN]}…",
            "backend": model["backend"],
            "context": _context(model),
            "loaded": f"{readable_time(model['ready_at'])}, in {model['load_s']:.2f} s",
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
    colour = {"ready": "green", "loading": "yellow"}.get(model["status"], "red")
    return f"[{colour}]{model['status']}[/]" + ("  [dim]serves :default[/]" if model["default"] else "")


def _usage_table(memory: dict[str, DeviceUse]) -> Table:
    sizes = ("weights", "KV cache", "compute", "saved", "together")
    table = table_of("memory on", *sizes, right=", ".join(sizes))
    for device, usage in memory.items():
        table.add_row(device, *(readable(size) for size in _sizes(usage)))
    return table


def _sizes(usage: DeviceUse) -> list[int]:
    sizes = [usage["weights_bytes"], usage["kv_bytes"], usage["compute_bytes"], usage["saved_bytes"]]
    return [*sizes, sum(sizes)]


def render_memory(workers: Sequence[MemoryView]) -> RenderableType:
    """Return a table per worker with its devices, and below each device the models on it."""
    return Group(*(_worker_table(worker) for worker in workers))


def _worker_table(worker: MemoryView) -> Table:
    budget = worker["budget"] if isinstance(worker["budget"], str) else readable(worker["budget"])
    taken = readable(sum(model.get("memory_bytes", 0) for model in worker["models"]))
    title = f"{worker['worker']}  [dim]models take {taken}; memory_budget {budget}, on_full {worker['on_full']}[/]"
    sizes = ("total", "free", "weights", "KV cache", "compute", "saved", "together")
    table = table_of("device, models", *sizes, right=", ".join(sizes), title=title)
    for device in worker["devices"]:
        label = f"{device['name']} [dim]{device['description']}[/]"
        table.add_row(label, readable(device["total_bytes"]), readable(device["free_bytes"]))
        for model in worker["models"]:
            usage = model.get("memory", {}).get(device["name"])
            if usage:
                table.add_row(f"  {model['id']}", "", "", *(readable(size) for size in _sizes(usage)))
    vram = worker.get("vram")
    table.caption, table.caption_justify = "no GPU: llama.cpp is built for the CPU, or finds no other device", "left"
    if vram is not None:
        used, total = readable(vram["used_bytes"]), readable(vram["total_bytes"])
        table.caption = f"of all GPUs together {used} of {total} are in use"
    return table
