"""The endpoints that list models and report the health of the gateway."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cellama.tasks.contract.errors import JobError
from cellama.tasks.contract.shapes.workers import ModelView

from .context import caller_of
from .errors import ApiError, of_job
from .gateway import EVERY_MODEL, gateway_of


async def models(request: Request) -> Response:
    """Handle `GET /v1/models`."""
    gateway = gateway_of(request)
    caller = await caller_of(request)
    return JSONResponse({"object": "list", "data": list(map(_model_object, await gateway.listed_models(caller)))})


async def model(request: Request) -> Response:
    """Handle `GET /v1/models/{id}`."""
    gateway = gateway_of(request)
    caller = await caller_of(request)
    name = request.path_params["model"]
    view = await gateway.find_model(caller, name)
    return JSONResponse(_model_object({**view, "id": name if name in gateway.settings.model_aliases else view["id"]}))


def _model_object(view: ModelView) -> dict[str, Any]:
    known = {"ctx_per_slot": "context_length", "architecture": "architecture", "n_params": "n_params"}
    return {
        "id": view["id"],
        "object": "model",
        "created": int(view.get("ready_at") or 0),
        "owned_by": "cellama",
        "capabilities": view["capabilities"],
        **{field: view[name] for name, field in known.items() if view.get(name)},  # type: ignore[literal-required]
    }


async def health(request: Request) -> Response:
    """Handle `GET /health`, which succeeds if the gateway is running."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Handle `GET /ready`, which succeeds if Redis answers and a model on a worker accepts jobs."""
    try:
        is_ready = bool(await gateway_of(request).models(EVERY_MODEL))
        reason = "no worker has a model that accepts jobs; load one, or start a worker"
    except JobError as error:
        is_ready, reason = False, of_job(error).message
    if not is_ready:
        raise ApiError(503, reason, code="not_ready")
    return JSONResponse({"status": "ready"})


ROUTES = (
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
)
