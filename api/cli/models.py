"""The commands for models and their adapters on running workers."""

from __future__ import annotations

import contextlib
import json as json_module
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.markup import escape

from cellama.api.client.client import (
    ADAPTER_LOAD_TIMEOUT_S,
    ADAPTER_UNLOAD_TIMEOUT_S,
    EVICT_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    UNLOAD_TIMEOUT_S,
    Client,
)
from cellama.tasks.contract.errors import InvalidJob, UnknownModel
from cellama.tasks.contract.shapes.workers import LoadFailure

from .generation import JsonOption
from .memory import num_params, readable, render_info, render_memory
from .output import err, out, print_json, table_of

WorkerOption = Annotated[str | None, typer.Option("--worker", "-w", help="Only this worker, instead of a pool.")]
PoolOption = Annotated[str | None, typer.Option("--pool", help="Only the workers of this pool, also later ones.")]
NameArgument = Annotated[str, typer.Argument(help="Name of the adapter.")]
IdArgument = Annotated[str, typer.Argument(help="Id of the model.")]


def models_list_command(json: JsonOption = False) -> None:
    """List the models that live workers have, or are loading.

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
    """Show what is known of a model: what it is, how it is loaded, and the memory that it takes.

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
    model: Annotated[str, typer.Argument(help="Id of the model; left out, it is made from the source.")],
    source: Annotated[
        str | None, typer.Argument(help="Path of a GGUF file as the workers see it, hf://…, or bundled://tiny.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE as in cellama.toml; may be given more than once."),
    ] = None,
    default: Annotated[bool, typer.Option("--default", help="Serve `:default` from it.")] = False,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it takes jobs.")] = LOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Load a model on running workers; others serve on meanwhile.

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
    timeout: Annotated[float, typer.Option(help="Seconds for its running jobs to end.")] = UNLOAD_TIMEOUT_S,
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
    timeout: Annotated[float, typer.Option(help="Seconds for the states to be saved.")] = EVICT_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Empty a model's idle slots and its RAM tier; what is worth it goes to disk. The model stays, and jobs go on.

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
    scale: Annotated[float, typer.Option(help="For jobs that do not choose; 0 = only for those that do.")] = 1.0,
    worker: WorkerOption = None,
    pool: PoolOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until jobs can have it.")] = ADAPTER_LOAD_TIMEOUT_S,
    json: JsonOption = False,
) -> None:
    """Load a LoRA adapter for a model; jobs run on meanwhile.

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
    scale: Annotated[float, typer.Argument(help="For jobs that do not choose; 0 = only for those that do.")],
    worker: WorkerOption = None,
    pool: PoolOption = None,
    json: JsonOption = False,
) -> None:
    """Change the scale of an adapter for the jobs that come from now on.

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
        float, typer.Option(help="Seconds for the jobs that have it to end.")
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
    """Says what Ctrl-C does: workers load on, because others may wait for it, too."""
    try:
        with err.status(f"loading {name} …"):
            yield
    except KeyboardInterrupt:
        err.print(f"\n[yellow]the workers go on loading {name}; `{undo}` drops it when it is there[/]", soft_wrap=True)
        raise


def _options(given: list[str]) -> dict[str, Any]:
    """NAME=VALUE; values are JSON where they can be, else text."""
    options: dict[str, Any] = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not equals:
            raise InvalidJob(f"--set {entry!r} is no NAME=VALUE; write for instance --set n_parallel=16")
        try:
            options[name] = json_module.loads(text)
        except ValueError:
            options[name] = text
    return options


def _not_so_on(client: Client, model_id: str, adapter: str | None = None) -> dict[str, LoadFailure]:
    """By worker: why it could not load or unload what others did."""
    found = {worker.name: thing for worker in client.workers() for thing in worker.wanted if thing["model"] == model_id}
    return {name: thing["why"] for name, thing in found.items() if thing["adapter"] == adapter and thing["why"]}


def _say(json: bool, value: dict[str, Any], text: str, but: dict[str, LoadFailure] | None = None) -> None:
    """`but` has the workers on which it is not so yet, with the reason; they try again."""
    if json:
        print_json(value)
        return
    out.print(text)
    for worker, failure in (but or {}).items():
        err.print(f"[yellow]but not on {escape(worker)}, which tries again: {escape(failure['message'])}[/]")
