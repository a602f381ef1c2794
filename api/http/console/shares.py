"""The console page that shows how tenants share the workers. Only administrators see this page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cellama.api.http.gateway import gateway_of
from cellama.tasks.state.tenants import TenantShare

from .rendering import count_text, fragment, page
from .session import console_caller, require_admin
from .visible import visible

MAX_SHOWN = 200  # tenants on the page, those with the most service


async def show(request: Request) -> Response:
    """Handle `GET /console/tenants`."""
    return page(request, "shares.html", **await _context(request))


async def table(request: Request) -> Response:
    """Handle `GET /console/tenants/table`, the part of the page that is updated every few seconds."""
    return fragment(request, "_shares.html", **await _context(request))


async def _context(request: Request) -> dict[str, Any]:
    require_admin(await console_caller(request))
    shares = await gateway_of(request).client.tenants()
    return {"tenants": _rows(shares[:MAX_SHOWN], shares), "num_more": max(0, len(shares) - MAX_SHOWN)}


def _rows(shown: Sequence[TenantShare], shares: Sequence[TenantShare]) -> list[dict[str, Any]]:
    total = sum(share.service for share in shares) or 1.0
    return [
        {
            "name": visible(share.key),
            "weight": f"{share.weight:g}",
            "waiting": count_text(share.num_waiting),
            "running": count_text(share.num_running),
            "service": count_text(share.service),
            "percent": round(100 * share.service / total),
        }
        for share in shown
    ]


ROUTES = (
    Route("/console/tenants", show, methods=["GET"]),
    Route("/console/tenants/table", table, methods=["GET"]),
)
