"""`cellama tune`: measures a model in a process of its own, shows the table, and keeps the result for later loads."""

from __future__ import annotations

import importlib.util
import json as json_module
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from cellama.config import ModelSettings, get_settings
from cellama.tasks.contract.codes import Exit

from .generation import JsonOption
from .output import err, out, print_error, print_json
from .services import check_installed

CHOICES = ("n_parallel", "kv_layout", "n_ubatch", "threads")
MEASURED_WITH = (
    *("n_gpu_layers", "flash_attention", "cache_type_k", "cache_type_v"),
    *("n_batch", "chunk_size", "batch_strategy", "pooling"),
)
END_TIMEOUT_S = 10.0
BUSY = 0.25  # of the cores

Row = dict[str, Any]  # as engine/tuning/__main__.py writes it


def tune_command(
    model: Annotated[str, typer.Argument(help="Id of a model of the settings, a GGUF file, hf://…, bundled://tiny.")],
    seconds: Annotated[float, typer.Option(min=1, help="Time for measuring.")] = 150.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to try at most; default: all cores.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Slots to try at most.")] = 64,
    json: JsonOption = False,
) -> None:
    """Measure slots, KV layout, passes and threads of a model on this machine; options left at "auto" have them then.

    Example:  cellama tune model.gguf
    """
    check_installed()
    if importlib.util.find_spec("llama_cpp") is None:
        print_error("tuning needs llama_cpp; install cellama[worker]")
        raise typer.Exit(Exit.USAGE)
    settings = _find(model)
    with _Process(_request(settings, seconds, threads, slots)) as process:
        end = _watch(model, process, json)
    if "result" not in end:
        print_error(end.get("error") or f"the measuring process ended with exit code {process.returncode}")
        if end.get("code") == "model_load_failed" and settings.id == _UNNAMED:
            known = ", ".join(known.id for known in get_settings().models)
            err.print(f"models of the settings, whose ids can be given, too: {known}", markup=False)
        raise typer.Exit(Exit.FAILED)
    result: dict[str, Any] = end["result"]
    if json:
        print_json({"model": model, **result})
    else:
        out.print(_table(result["rows"], result["generates"], result["chosen"]["setup"], result["work"]))
        _explain(result, settings)
    if result["problem"]:
        print_error(f"the result can't be kept: {result['problem']}; set XDG_CACHE_HOME to a folder of yours")
        raise typer.Exit(Exit.FAILED)


_UNNAMED = "tuned-source"


def _find(model: str) -> ModelSettings:
    """The model of the settings with that id, else one with that source."""
    named = next((known for known in get_settings().models if known.id == model), None)
    return named or ModelSettings(id=_UNNAMED, source=model)


def _request(model: ModelSettings, seconds: float, threads: int | None, slots: int) -> dict[str, Any]:
    return {
        "source": model.source,
        "options": {name: getattr(model, name) for name in MEASURED_WITH},
        "capabilities": model.capabilities,
        "hub": {
            "cache_dir": model.hub_cache_dir,
            "token": model.hub_token,
            "force": model.hub_force,
            "offline": model.hub_offline,
        },
        "seconds": seconds,
        "max_threads": threads,
        "max_slots": slots,
    }


@dataclass
class _Process:
    """The measuring process, which ends with the `with` block."""

    request: dict[str, Any]
    returncode: int | None = None

    def __enter__(self) -> _Process:
        argv = [sys.executable, "-m", "cellama.engine.tuning"]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json_module.dumps(self.request))  # not an argument: it may hold a token of the hub
        self._process.stdin.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.terminate()
        try:
            self.returncode = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.returncode = self._process.wait()

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it says, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json_module.loads(line)


def _watch(model: str, process: _Process, json: bool) -> dict[str, Any]:
    """Shows each measurement as it comes; returns what came last. Ctrl-C tells what was found until then."""
    rows: list[Row] = []
    live = out.is_terminal and not json
    try:
        with Live(console=out, transient=True, auto_refresh=False) if live else _Plain() as view:
            for message in process.messages():
                if "row" not in message:
                    return message
                rows = [row for row in rows if row["setup"] != message["row"]["setup"]] + [message["row"]]
                generates = rows[0]["setup"]["n_parallel"] is not None
                if live:
                    best = max(rows, key=lambda row: float(row["tokens_per_s"]))
                    view.update(Group(_table(rows, generates, best["setup"]), f"measuring {model} …"), refresh=True)
                elif not json:
                    out.print(f"{_in_words(rows[-1]['setup'])}: {_rates(rows[-1])}", markup=False)
    except KeyboardInterrupt:
        err.print("interrupted: nothing was kept")
        if rows:
            best = max(rows, key=lambda row: float(row["tokens_per_s"]))
            err.print(f"the fastest so far: {_in_words(best['setup'])}: {_rates(best)}", markup=False)
        raise
    return {}


class _Plain:
    """In place of a live table, where there is no terminal."""

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _table(rows: list[Row], generates: bool, marked: Row, work: dict[str, int] | None = None) -> Table:
    names = CHOICES if generates else ("threads",)
    title = None
    if work is not None and generates:
        lengths = f"{work['prompt_tokens']} tokens and {work['new_tokens']} new ones"
        title = f"32 requests, or two per slot, half of them {lengths}, the others up to twice as long"
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in ("", *names, "tokens/s", *(["first token ms"] if generates else [])):
        table.add_column(column, justify="left" if column in ("", "kv_layout") else "right")
    for row in rows:
        setup, ttft = row["setup"], row["ttft_ms"]
        values = [str(setup[name]) for name in names] + [f"{row['tokens_per_s']:.0f}"]
        chosen = setup == marked
        table.add_row(
            "►" if chosen else "",
            *values,
            *([f"{ttft:.0f}" if ttft is not None else ""] if generates else []),
            style="bold green" if chosen else None,
        )
    return table


def _in_words(setup: Row) -> str:
    return ", ".join(f"{name} {setup[name]}" for name in CHOICES if setup[name] is not None)


def _rates(row: Row) -> str:
    first = "" if row["ttft_ms"] is None else f", first token after {row['ttft_ms']:.0f} ms"
    return f"{row['tokens_per_s']:.0f} tokens/s{first}"


def _explain(result: dict[str, Any], settings: ModelSettings) -> None:
    """What was chosen, where it counts, and what may keep it from counting."""
    machine = result["machine"]
    if not result["generates"]:
        out.print("this model only reads texts, for vectors or scores: there is nothing to tune but threads")
    if result["load"] > BUSY:
        out.print(f"other programs kept {result['load']:.0%} of the cores busy before: these figures are less sure")
    if result["num_skipped"]:
        out.print(f"there was no time for {result['num_skipped']} more; --seconds allows more")
    out.print(f"best: {_in_words(result['chosen']['setup'])}", style="bold", markup=False)
    if result["kept"]:
        where = " + ".join([f"{machine['cpu']}, {machine['cores']} cores", *machine["gpus"]])
        text = f"kept for {where}, llama.cpp of llama-cpp-python {machine['llama_cpp']}: {result['kept']}"
        out.print(text, markup=False, soft_wrap=True)
    chosen = result["chosen"]["setup"]
    fixed = [name for name in CHOICES if chosen[name] is not None and getattr(settings, name) not in (None, "auto")]
    if fixed:
        said = ", ".join(f"{name} = {getattr(settings, name)}" for name in fixed)
        out.print(
            f'the settings of {settings.id} say {said}; write "auto" there to use what was measured', markup=False
        )
