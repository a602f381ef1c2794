"""Store and apply the results of `cellama tune`. Each model has one JSON file, named after its fingerprint.

The file is `$XDG_CACHE_HOME/cellama/tuned/FINGERPRINT.json`. `$XDG_CACHE_HOME` is `~/.cache` by default. The format is:

    `{"version": 1, "results": [{"conditions": {…}, "chosen": {…}, "at": "2026-01-31T12:00:00+00:00"}]}`

When a model is loaded, a result is used only if it was measured under the same conditions: CPU, cores, GPUs, llama.cpp
version, and the options that affect the computation. Invalid files and entries are ignored and logged as warnings.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from cellama.config.logging import event_logger
from cellama.engine.errors import InvalidRequest
from cellama.engine.options import EngineOptions

log = event_logger(__name__)

VERSION = 1
SAME_OPTIONS = (
    *("n_gpu_layers", "devices", "rpc", "split_mode", "tensor_split", "main_gpu", "n_cpu_moe", "override_tensors"),
    *("kv_offload", "flash_attention", "cache_type_k", "cache_type_v"),
)

Conditions = dict[str, Any]  # JSON


@dataclass(frozen=True, slots=True)
class Setup:
    """The tuned options of a model. For embedding models, only `threads` is tuned."""

    threads: int
    n_parallel: int | None = None
    kv_layout: Literal["unified", "partitioned"] | None = None
    n_ubatch: int | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured speed of a setup.

    `tokens_per_s` includes the prompt tokens and generated tokens of all requests.
    """

    setup: Setup
    tokens_per_s: float
    ttft_ms: float | None  # median time to the first token of requests that get a slot immediately
    took_s: float  # duration of the measurement


def directory() -> Path:
    """Return the directory that contains the results. The directory may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellama" / "tuned"


def conditions(options: EngineOptions) -> Conditions:
    """Return the conditions under which a result is valid: the machine, and the options that affect the computation."""
    from cellama.engine.llama import machine

    found: Conditions = json.loads(json.dumps({**machine(), **{name: getattr(options, name) for name in SAME_OPTIONS}}))
    return found  # with lists instead of tuples, as in the file


def store_result(fingerprint: str, given: Conditions, chosen: Setup) -> Path:
    """Store a result and return the path of its file. Raises OSError.

    The new result replaces any earlier result for the same conditions.
    """
    path = directory() / f"{fingerprint}.json"
    others = [result for result in _results(path) if result["conditions"] != given]
    result = {"conditions": given, "chosen": asdict(chosen), "at": datetime.now(UTC).isoformat(timespec="seconds")}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".partial", delete=False) as file:
        json.dump({"version": VERSION, "results": [*others, result]}, file, indent=1)
    os.replace(file.name, path)  # readers see the old file or the new one
    return path


def find_result(fingerprint: str, given: Conditions) -> Setup | None:
    """Return the setup chosen for a model under these conditions, or None if the model has not been tuned."""
    path = directory() / f"{fingerprint}.json"
    for result in _results(path):
        if result["conditions"] == given:
            try:
                return _to_setup(result["chosen"])
            except (KeyError, TypeError, ValueError, InvalidRequest) as error:
                log.warning(
                    "tuning result ignored", path=str(path), detail=f"damaged file: {error}; run `cellama tune` again"
                )
    return None


def lacks_result(options: EngineOptions, fingerprint: str) -> bool:
    """Return whether a model has never been tuned under its conditions, although its speed depends on unset options.

    The numbers of slots and threads matter most, so a model for which both are set does not need a result.
    """
    return bool({"threads", "n_parallel"} & set(_unset(options))) and (
        find_result(fingerprint, conditions(options)) is None
    )


def apply(options: EngineOptions, path: Path) -> tuple[EngineOptions, tuple[str, ...]]:
    """Return the options with tuned values for unset options, and the names of the tuned options.

    If `n_ctx` is set, the slots share a fixed context, so `n_parallel` and `kv_layout` are not tuned. `kv_layout` is
    tuned only together with `n_parallel`, because the best layout depends on the number of slots. Raises
    ModelLoadFailed if the file is damaged.
    """
    names = _unset(options)
    if not names or not directory().is_dir():
        return options, ()
    from cellama.engine.llama import fingerprint_of

    setup = find_result(fingerprint_of(path, options), conditions(options))
    if setup is None:
        return options, ()
    found = {name: value for name in names if (value := getattr(setup, name)) is not None}
    if _is_micro_batch_too_small(options, found):
        found = {name: value for name, value in found.items() if name not in ("n_parallel", "kv_layout")}
    if _is_micro_batch_too_small(options, found):
        found.pop("n_ubatch", None)
    return replace(options, **found), tuple(found)


def _is_micro_batch_too_small(options: EngineOptions, found: dict[str, Any]) -> bool:
    """Return whether a micro-batch would be too small for a prefill chunk or for one token per slot."""
    pass_tokens = min(found.get("n_ubatch") or options.pass_tokens, options.n_batch)
    return bool(max(found.get("n_parallel") or options.num_slots, options.chunk_size or 0) > pass_tokens)


def _unset(options: EngineOptions) -> list[str]:
    names = [name for name in ("threads", "n_ubatch") if getattr(options, name) is None]
    if options.n_parallel is None and options.n_ctx is None:
        names.append("n_parallel")
        if options.kv_layout == "auto":
            names.append("kv_layout")
    return names


def _results(path: Path) -> list[dict[str, Any]]:
    """Return the file's results that contain conditions, or an empty list if the file can't be read."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION:
            raise ValueError(f"version {stored['version']!r} is not supported")
        return [dict(result) for result in stored["results"] if isinstance(result["conditions"], dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("tuning results ignored", path=str(path), detail=f"{error!r}; run `cellama tune` again")
        return []


def _to_setup(stored: dict[str, Any]) -> Setup:
    """Validate a stored setup and return it. Raises KeyError, TypeError, InvalidRequest."""
    setup = Setup(**{field.name: stored[field.name] for field in fields(Setup)})
    EngineOptions(
        threads=setup.threads,
        n_parallel=setup.n_parallel,
        n_ubatch=setup.n_ubatch,
        kv_layout=setup.kv_layout or "auto",
        n_batch=max(2048, setup.n_parallel or 0),
    )
    return setup
