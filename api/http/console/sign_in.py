"""Sign in to the console with an API key, and sign out."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from cellama.api.http.auth import Caller
from cellama.api.http.context import check_load
from cellama.api.http.errors import ApiError
from cellama.api.http.gateway import gateway_of
from cellama.api.http.keys.access import KeyCaller
from cellama.config.logging import event_logger

from .forms import form_of
from .rendering import page
from .session import COOKIE, SESSION_S, ConsoleSessions, SignInRequired, base_of, check_same_origin, console_caller

log = event_logger(__name__)

MAX_NEXT_CHARS = 2000  # of the path to which a sign-in returns


async def show(request: Request) -> Response:
    """Handle `GET /console/sign-in`.

    A visitor who has signed in, or who doesn't need a key, is redirected to the requested page.
    """
    target = _target(request, request.query_params.get("next"))
    try:
        await console_caller(request)
    except SignInRequired:
        return page(request, "sign_in.html", next=target, problem=None)
    return RedirectResponse(target, 303)


async def sign_in(request: Request) -> Response:
    """Handle `POST /console/sign-in`, which starts a session."""
    gateway = gateway_of(request)
    check_load(gateway)
    check_same_origin(request)
    form = await form_of(request)
    target = _target(request, form.get("next"))
    try:
        caller: Caller = await gateway.access.authenticate({"x-api-key": form.get("key", ""), **_host(request)})
    except ApiError as error:
        if error.status != 401:
            raise
        log.warning("console sign-in failed", client=request.client.host if request.client else "")
        problem = "The key is not valid, has expired or was revoked. Check that it starts with sk- and is complete."
        return page(request, "sign_in.html", status=401, next=target, problem=problem)
    response = RedirectResponse(target, 303)
    if isinstance(caller, KeyCaller):
        await _end_session(request)
        token = await ConsoleSessions(gateway.redis).start(caller)
        log.info("signed in to console", key=caller.key_id, tenant=caller.tenant)
        response.set_cookie(
            COOKIE,
            token,
            max_age=SESSION_S,
            path=base_of(request),
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
    return response


async def sign_out(request: Request) -> Response:
    """Handle `POST /console/sign-out`, which ends the session."""
    check_same_origin(request)
    await _end_session(request)
    response = RedirectResponse(f"{base_of(request)}/sign-in", 303)
    response.delete_cookie(COOKIE, path=base_of(request), httponly=True, samesite="strict")
    return response


async def _end_session(request: Request) -> None:
    if token := request.cookies.get(COOKIE):
        await ConsoleSessions(gateway_of(request).redis).end(token)


def _host(request: Request) -> dict[str, str]:
    """Return the headers that let the gateway recognise requests from this machine."""
    return {name: text for name, text in request.headers.items() if name not in ("authorization", "x-api-key")}


def _target(request: Request, path: str | None) -> str:
    """Return the path if it belongs to a console page, otherwise the console's path.

    This prevents a sign-in from redirecting to another site.
    """
    base = base_of(request)
    is_own = path is not None and (path == base or path.startswith((f"{base}/", f"{base}?"))) and ".." not in path
    return path if path and is_own and len(path) <= MAX_NEXT_CHARS and path.isprintable() else base


ROUTES = (
    Route("/console/sign-in", show, methods=["GET"]),
    Route("/console/sign-in", sign_in, methods=["POST"]),
    Route("/console/sign-out", sign_out, methods=["POST"]),
)
