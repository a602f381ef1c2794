"""The metrics endpoint. Metrics cover all tenants, so API keys don't grant access to them."""

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

RULE = "it serves this machine only, unless gateway_metrics_token is set and sent as `Authorization: Bearer …`"


async def metrics(request: Request) -> Response:
    """Handle `GET /metrics`."""
    gateway = gateway_of(request)
    token = gateway.settings.gateway_metrics_token
    if token is None:
        await _check_local(request)
    else:
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        token_bytes = token.get_secret_value().encode()
        if kind.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), token_bytes):
            raise ApiError(401, f"/metrics requires the token set in gateway_metrics_token; {RULE}")
    return Response(text_of(gateway.counts.figures()), media_type=CONTENT_TYPE)


async def _check_local(request: Request) -> None:
    """Raise ApiError for requests from other machines.

    The error from LoopbackOnly is not used because it recommends an API key, which doesn't grant access to metrics.
    """
    if request.client is not None and is_loopback(request.client.host):
        with contextlib.suppress(ApiError):
            await LoopbackOnly().authenticate(request.headers)
            return
    raise ApiError(403, f"/metrics does not accept this request; {RULE}")


ROUTES = (Route("/metrics", metrics, methods=["GET"]),)
