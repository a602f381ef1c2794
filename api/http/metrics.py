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
            raise ApiError(
                401,
                "/metrics: the token is missing or not valid; send the value of the setting gateway_metrics_token as "
                "`Authorization: Bearer …`",
            )
    return Response(text_of(gateway.counts.figures()), media_type=CONTENT_TYPE)


async def _check_local(request: Request) -> None:
    """Raise ApiError for requests from other machines.

    The error from LoopbackOnly is not used because it recommends an API key, which doesn't grant access to metrics.
    """
    if request.client is not None and is_loopback(request.client.host):
        with contextlib.suppress(ApiError):
            await LoopbackOnly().authenticate(request.headers)
            return
    raise ApiError(
        403,
        "/metrics: requests from other machines are not allowed while gateway_metrics_token is not set; set it, and "
        "send it as `Authorization: Bearer …`",
    )


ROUTES = (Route("/metrics", metrics, methods=["GET"]),)
