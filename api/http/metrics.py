"""The endpoint of metrics. It tells of all tenants, so no API key opens it."""

from __future__ import annotations

import contextlib
import hmac

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cellama.tasks.metrics.exposition import CONTENT_TYPE, text_of

from .auth import LoopbackOnly, is_loopback
from .errors import ApiError
from .gateway import gateway_of

NEEDS = "is for this machine only, unless gateway_metrics_token is set and sent as `Authorization: Bearer …`"


async def metrics(request: Request) -> Response:
    """GET /metrics"""
    gateway = gateway_of(request)
    token = gateway.settings.gateway_metrics_token
    if token is None:
        await _check_it_is_from_here(request)
    else:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        known = token.get_secret_value().encode()
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), known):
            raise ApiError(401, f"/metrics needs the token of gateway_metrics_token; it {NEEDS}")
    return Response(text_of(gateway.counts.figures()), media_type=CONTENT_TYPE)


async def _check_it_is_from_here(request: Request) -> None:
    """Raises ApiError: what LoopbackOnly says of keys would not help here."""
    if request.client is not None and is_loopback(request.client.host):
        with contextlib.suppress(ApiError):
            await LoopbackOnly().authenticate(request.headers)
            return
    raise ApiError(403, f"/metrics {NEEDS}")


ROUTES = (Route("/metrics", metrics, methods=["GET"]),)
