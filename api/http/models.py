"""The endpoints that list models in OpenAI's and Anthropic's formats, and report the gateway's health."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from cellama.api.anthropic.models import model_info, page_of
from cellama.tasks.contract.errors import JobError
from cellama.tasks.contract.json_values import shorten
from cellama.tasks.contract.shapes.workers import ModelView

from .anthropic import MODELS, speaks_anthropic
from .context import caller_of
from .errors import ApiError, of_job
from .gateway import EVERY_MODEL, gateway_of
from .parsing import PageQuery

PAGE, MAX_PAGE = 20, 1000  # models per page in Anthropic's format
_ACTIVE = "active"  # the only state that a served model has in Anthropic's format


async def models(request: Request) -> Response:
    """Handle `GET /v1/models`."""
    gateway = gateway_of(request)
    caller = await caller_of(request)
    views = await gateway.listed_models(caller)
    if speaks_anthropic(request):
        return JSONResponse(_anthropic_page(request, views))
    return JSONResponse({"object": "list", "data": list(map(_model_object, views))})


def _anthropic_page(request: Request, views: list[ModelView]) -> dict[str, Any]:
    """Return the requested page of models. The most recently loaded model comes first. Raises ApiError."""
    query = request.query_params
    states = query.getlist("lifecycle") + query.getlist("lifecycle[]")
    served = [] if states and _ACTIVE not in states else views
    newest = sorted(served, key=lambda view: view.get("ready_at") or 0, reverse=True)
    after_id, before_id = query.get("after_id"), query.get("before_id")
    limit = PageQuery.of({"limit": query.get("limit", str(PAGE))}, PAGE, MAX_PAGE).limit
    try:
        return page_of([model_info(view) for view in newest], limit, after_id, before_id)
    except ValueError:
        name = "before_id" if after_id is None else "after_id"
        message = f"{name} is {shorten(query[name])}; it must be the id of a model in the list"
        raise ApiError(400, message, param=name) from None


async def model(request: Request) -> Response:
    """Handle `GET /v1/models/{id}`."""
    gateway = gateway_of(request)
    caller = await caller_of(request)
    name = request.path_params["model"]
    view = await gateway.find_model(caller, name)
    if name in gateway.settings.model_aliases:
        view = {**view, "id": name}
    return JSONResponse(model_info(view) if speaks_anthropic(request) else _model_object(view))


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


async def root(request: Request) -> Response:
    """Handle `GET /`. Redirect browsers to the console, and return the gateway's API paths to other clients."""
    console = "/console"
    has_console = any(getattr(route, "path", "") == console for route in request.app.routes)
    if has_console and "text/html" in request.headers.get("accept", ""):
        return RedirectResponse(request.scope.get("root_path", "") + console, 303)
    served = {"service": "cellama", "openai": "/v1", "anthropic": "/v1/messages", "health": "/health"}
    return JSONResponse({**served, "console": console} if has_console else served)


async def health(request: Request) -> Response:
    """Handle `GET /health`, which succeeds if the gateway is running."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """Handle `GET /ready`, which succeeds if Redis answers and a model on a worker accepts jobs."""
    try:
        is_ready = bool(await gateway_of(request).models(EVERY_MODEL))
        reason = "no worker has a model that accepts jobs; load a model, or start a worker"
    except JobError as error:
        is_ready, reason = False, of_job(error).message
    if not is_ready:
        raise ApiError(503, reason, code="not_ready")
    return JSONResponse({"status": "ready"})


ROUTES = (
    Route("/", root, methods=["GET"]),
    Route(MODELS, models, methods=["GET"]),
    Route(MODELS + "/{model:path}", model, methods=["GET"]),
    Route("/health", health, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
)
