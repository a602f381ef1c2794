"""Results of `cellama tune`, kept per model and machine in a JSON file per model, which its fingerprint names.

`$XDG_CACHE_HOME/cellama/tuned/FINGERPRINT.json`, by default below `~/.cache`:

    {"version": 1, "results": [{"conditions": {…}, "chosen": {…}, "at": "2026-01-31T12:00:00+00:00"}]}

A load uses a result whose conditions are those of the load: CPU, cores, GPUs, version of llama.cpp, and the options
that change the computation. Anything else in such a file is ignored, with a line in the log.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from cellama.engine.errors import InvalidRequest
from cellama.engine.options import EngineOptions

log = logging.getLogger(__name__)

VERSION = 1
SAME_OPTIONS = ("n_gpu_layers", "flash_attention", "cache_type_k", "cache_type_v")

Conditions = dict[str, Any]  # JSON


@dataclass(frozen=True, slots=True)
class Setup:
    """One way of running a model. An embedding model has only `threads`."""

    threads: int
    n_parallel: int | None = None
    kv_layout: Literal["unified", "partitioned"] | None = None
    n_ubatch: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """How fast a setup is: tokens per second of all requests together, of prompts and generated."""

    setup: Setup
    tokens_per_s: float
    ttft_ms: float | None  # time to the first token: median of the requests that get a slot at once
    took_s: float  # the measurement


def directory() -> Path:
    """Return where results are kept; the directory need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellama" / "tuned"


def conditions(options: EngineOptions) -> Conditions:
    """Return what a result depends on besides the model: the machine, and the options that change the computation."""
    from cellama.engine.llama import machine

    return {**machine(), **{name: getattr(options, name) for name in SAME_OPTIONS}}


def keep(fingerprint: str, given: Conditions, chosen: Setup) -> Path:
    """Write a result in place of an earlier one for the same conditions, and return its file. Raises OSError."""
    path = directory() / f"{fingerprint}.json"
    others = [result for result in _results(path) if result["conditions"] != given]
    result = {"conditions": given, "chosen": asdict(chosen), "at": datetime.now(UTC).isoformat(timespec="seconds")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".partial", delete=False) as file:
        json.dump({"version": VERSION, "results": [*others, result]}, file, indent=1)
    os.replace(file.name, path)  # readers see the old file or the new one
    return path


def recall(fingerprint: str, given: Conditions) -> Setup | None:
    """Return what was chosen for this model under these conditions; None if it was not measured."""
    path = directory() / f"{fingerprint}.json"
    for result in _results(path):
        if result["conditions"] == given:
            try:
                return _to_setup(result["chosen"])
            except (KeyError, TypeError, ValueError, InvalidRequest) as error:
                log.warning("a result in %s is damaged and ignored (%s); run `cellama tune` again", path, error)
    return None


def apply(options: EngineOptions, path: Path) -> tuple[EngineOptions, tuple[str, ...]]:
    """Return the options with what was measured where they leave the choice, and the names of these options.

    `n_ctx` shares a fixed context among the slots, and a layout suits a number of slots. So with `n_ctx` both stay what
    they were, and the layout is taken only together with the slots. Raises ModelLoadFailed for a broken file.
    """
    left = _left_open(options)
    if not left or not directory().is_dir():
        return options, ()
    from cellama.engine.llama import fingerprint

    setup = recall(fingerprint(path), conditions(options))
    if setup is None:
        return options, ()
    found = {name: value for name in left if (value := getattr(setup, name)) is not None}
    if _is_too_narrow(options, found):
        found = {name: value for name, value in found.items() if name not in ("n_parallel", "kv_layout")}
    if _is_too_narrow(options, found):
        found.pop("n_ubatch", None)
    return replace(options, **found), tuple(found)


def _is_too_narrow(options: EngineOptions, found: dict[str, Any]) -> bool:
    """Return whether a micro-batch would have fewer tokens than there are slots, or than a chunk of a prompt."""
    pass_tokens = min(found.get("n_ubatch") or options.pass_tokens, options.n_batch)
    return bool(max(found.get("n_parallel") or options.num_slots, options.chunk_size or 0) > pass_tokens)


def _left_open(options: EngineOptions) -> list[str]:
    names = [name for name in ("threads", "n_ubatch") if getattr(options, name) is None]
    if options.n_parallel is None and options.n_ctx is None:
        names.append("n_parallel")
        if options.kv_layout == "auto":
            names.append("kv_layout")
    return names


def _results(path: Path) -> list[dict[str, Any]]:
    """Return the results of a file, each with its conditions; none if the file can't be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION:
            raise ValueError(f"its version is {stored['version']!r}, not {VERSION}")
        return [dict(result) for result in stored["results"] if isinstance(result["conditions"], dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the tuned values in %s can't be used (%r); run `cellama tune` again", path, error)
        return []


def _to_setup(stored: dict[str, Any]) -> Setup:
    """Return a setup that the engine accepts. Raises KeyError, TypeError, InvalidRequest."""
    setup = Setup(**{field.name: stored[field.name] for field in fields(Setup)})
    EngineOptions(
        threads=setup.threads,
        n_parallel=setup.n_parallel,
        n_ubatch=setup.n_ubatch,
        kv_layout=setup.kv_layout or "auto",
        n_batch=max(2048, setup.n_parallel or 0),
    )
    return setup
