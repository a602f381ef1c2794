"""How models and their memory look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from cellama.tasks.contract.shapes.workers import DeviceUse, MemoryView, ModelView

from .output import readable_time, table_of

FINGERPRINT_SHOWN = 16  # digits; --json has all
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def readable(num_bytes: float) -> str:
    """A size: "1.5 GiB"."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or abs(size) >= 100 else f"{size:.1f} {_UNITS[unit]}"


def num_params(count: int) -> str:
    """A number of parameters: "3.9 M", "7.2 B"."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def render_info(model: ModelView) -> RenderableType:
    """Everything about one model that people ask for."""
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
    """A table per worker: its devices, and below each the models on it."""
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
