"""Identify console visitors by their sign-in sessions.

While no API key exists, visitors on this machine don't need a session. A session is a random token in a cookie. Redis
stores the token's digest with the API key's id and digest, so neither Redis nor the browser stores the key. On each
request, the gateway checks that the key is still active.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from urllib.parse import quote

from redis.asyncio import Redis
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from cellama.api.http.auth import Caller
from cellama.api.http.context import READ_ONLY_METHODS, check_load
from cellama.api.http.errors import ApiError
from cellama.api.http.gateway import Gateway, gateway_of
from cellama.api.http.keys.access import KeyAccess, KeyCaller
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.keys import console_session_key

COOKIE = "cellama_console"
SESSION_S = 12 * 3600  # a working day; then the visitor signs in again


class SignInRequired(Exception):
    """The visitor must sign in to see this page."""


async def console_caller(request: Request) -> Caller:
    """Return the visitor. Raises SignInRequired, or ApiError (403 for requests from other sites, or 503)."""
    gateway = gateway_of(request)
    check_load(gateway)
    check_same_origin(request)
    caller = await _session_caller(request, gateway)
    if caller is None:
        try:
            caller = await gateway.access.authenticate(request.headers)
        except ApiError as error:
            if error.status != 401:
                raise
            raise SignInRequired from None
    request.state.console_caller = caller
    return caller


def is_admin(caller: Caller) -> bool:
    """Return whether the visitor may see all tenants and manage keys."""
    if isinstance(caller, KeyCaller):
        return caller.entry is not None and caller.entry.admin
    return caller.key_id is None and caller.tenant is None  # no key exists, so this machine owns everything


def require_admin(caller: Caller) -> None:
    """Raise ApiError (403) unless the visitor is an administrator."""
    if not is_admin(caller):
        raise ApiError(
            403,
            "this page requires an administrator key; create one with `cellama keys create TENANT --admin`",
            code="admin_required",
        )


def visible_tenant(caller: Caller) -> str | None:
    """Return the tenant whose jobs and runs the visitor may see, or None if the visitor may see all tenants."""
    return None if is_admin(caller) else caller.tenant or ""


def base_of(request: Request) -> str:
    """Return the console's path, including the path at which another app mounts the gateway."""
    return f"{request.scope.get('root_path', '')}/console"


def check_same_origin(request: Request) -> None:
    """Raise ApiError (403) for a request sent by another site's page.

    Pages on other sites may only link to the console. Browsers send `Sec-Fetch-Site` over https and on loopback, and
    `Origin` with every request that can change data. A request that can change data is therefore rejected if it has
    neither of these headers.
    """
    headers = request.headers
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_read_only = request.method in READ_ONLY_METHODS
    if site is not None:
        is_link = is_read_only and headers.get("sec-fetch-mode") == "navigate"
        is_own = site == "same-origin" or (is_read_only and site == "none") or is_link
    elif origin is not None:
        is_own = origin.partition("://")[2] == headers.get("host", "").lower()
    else:
        is_own = is_read_only
    if not is_own:
        raise ApiError(
            403,
            "the console accepts only requests from its own pages; reload the page, and submit the form again",
            code="origin_not_allowed",
        )


@dataclass(frozen=True, slots=True)
class ConsoleSessions:
    """Starts, finds and ends the sessions of signed-in visitors."""

    redis: Redis

    async def start(self, caller: KeyCaller) -> str:
        """Store a session for a key's owner, and return the session's token. Raises RedisUnreachable."""
        assert caller.entry is not None
        token = secrets.token_urlsafe(32)
        session = json.dumps({"key_id": caller.entry.id, "digest": caller.entry.digest})
        with reaching_redis():
            await self.redis.set(_key_of(token), session, ex=SESSION_S)
        return token

    async def find(self, token: str) -> tuple[str, str] | None:
        """Return the id and digest of the session's key, or None if the session has ended. Raises RedisUnreachable."""
        with reaching_redis():
            found = await self.redis.get(_key_of(token))
        if found is None:
            return None
        session = json.loads(found)
        return session["key_id"], session["digest"]

    async def end(self, token: str) -> None:
        """Delete a session. Raises RedisUnreachable."""
        with reaching_redis():
            await self.redis.delete(_key_of(token))


def _key_of(token: str) -> str:
    return console_session_key(hashlib.sha256(token.encode()).hexdigest())


async def _session_caller(request: Request, gateway: Gateway) -> Caller | None:
    """Return the owner of the key that the visitor used to sign in, or None if there is no valid session."""
    token = request.cookies.get(COOKIE)
    if not token or not isinstance(gateway.access, KeyAccess):
        return None
    session = await ConsoleSessions(gateway.redis).find(token)
    return None if session is None else await gateway.access.owner_of(*session)


def sign_in_response(request: Request, _: Exception) -> Response:
    """Return the response for a visitor who must sign in: the sign-in form for page requests, otherwise an error."""
    base = base_of(request)
    form = f"{base}/sign-in"
    if "hx-request" in request.headers:
        return Response(status_code=401, headers={"hx-redirect": form})
    if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(f"{form}?next={quote(request.url.path + query)}", 303)
    error = ApiError(401, f"sign in at {form}, because this request needs a session", code="sign_in_required")
    return JSONResponse(error.envelope, 401)
