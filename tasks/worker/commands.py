"""Celery remote control of a worker: models and their adapters come and go. Imported in workers only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from celery.worker.control import control_command
from pydantic import ValidationError

from cellama.config import ModelSettings
from cellama.config.settings import explain
from cellama.engine import EngineError

Reply = dict[str, Any]  # what was begun, and when by this worker's clock; or an error


def _answer(action: Callable[[], None], done: str) -> Reply:
    try:
        action()
    except EngineError as error:
        return {"error": str(error), "code": error.code}
    except ValidationError as error:
        problems = "; ".join(explain(problem) for problem in error.errors())
        return {"error": problems, "code": "invalid_request"}
    return {"ok": done, "at": time.time()}


@control_command(args=[("model", dict)])  # type: ignore[untyped-decorator]
def cellama_load(state: Any, model: dict[str, Any], **_: Any) -> Reply:
    """Begins to load a model; `model` is what a `[[models]]` table has."""
    residency = state.app.runtime.residency
    return _answer(lambda: residency.load(ModelSettings(**model)), f"loading {model.get('id')}")


@control_command(args=[("model_id", str), ("timeout_s", float)])  # type: ignore[untyped-decorator]
def cellama_unload(state: Any, model_id: str, timeout_s: float, **_: Any) -> Reply:
    """Takes no more jobs of a model, and begins to drain it."""
    residency = state.app.runtime.residency
    return _answer(lambda: residency.unload(model_id, timeout_s), f"unloading {model_id}")


@control_command(args=[("model_id", str)])  # type: ignore[untyped-decorator]
def cellama_default(state: Any, model_id: str, **_: Any) -> Reply:
    """Serves `:default` from a model."""
    residency = state.app.runtime.residency
    return _answer(lambda: residency.set_default(model_id), f"{model_id} is the default")


@control_command(args=[("model_id", str), ("name", str), ("source", str), ("scale", float)])  # type: ignore[untyped-decorator]
def cellama_load_adapter(state: Any, model_id: str, name: str, source: str, scale: float, **_: Any) -> Reply:
    """Begins to load a LoRA adapter for a model."""
    residency = state.app.runtime.residency
    return _answer(lambda: residency.load_adapter(model_id, name, source, scale), f"loading {name}")


@control_command(args=[("model_id", str), ("name", str), ("scale", float)])  # type: ignore[untyped-decorator]
def cellama_scale_adapter(state: Any, model_id: str, name: str, scale: float, **_: Any) -> Reply:
    """Sets the scale of an adapter for jobs that do not choose."""
    residency = state.app.runtime.residency
    return _answer(lambda: residency.set_adapter_scale(model_id, name, scale), f"{name} has scale {scale:g}")


@control_command(args=[("model_id", str), ("name", str), ("timeout_s", float)])  # type: ignore[untyped-decorator]
def cellama_unload_adapter(state: Any, model_id: str, name: str, timeout_s: float, **_: Any) -> Reply:
    """Gives an adapter to no more jobs, and begins to drain it."""
    residency = state.app.runtime.residency
    return _answer(lambda: residency.unload_adapter(model_id, name, timeout_s), f"unloading {name}")
