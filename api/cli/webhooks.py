"""`cellama webhooks`: create, list and delete webhook endpoints."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.markup import escape

from cellama.api.webhooks.endpoints import Endpoint, EndpointStore, new_id, new_secret
from cellama.config import get_settings
from cellama.config.settings import explain

from .keys import with_redis
from .options import JsonOption
from .output import err, out, print_json, table_of

_T = TypeVar("_T")


def webhooks_create_command(
    url: Annotated[
        str, typer.Argument(help="URL of the endpoint (https://…). The gateways must be able to reach this URL.")
    ],
    tenant: Annotated[
        str, typer.Option(help="Tenant whose events are sent (default: events of requests without an API key).")
    ] = "",
    event: Annotated[
        list[str] | None,
        typer.Option("--event", "-e", help="Event type to send. Can be repeated (default: all)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Create an endpoint that is notified when batches and responses finish.

    The endpoint's secret is shown only once. Requests are signed according to Standard Webhooks, and retried for about
    three days until the endpoint answers with a 2xx status.

    Example:  cellama webhooks create https://example.org/hooks --tenant acme
    """
    secret = new_secret()
    given = {"id": new_id(), "tenant": tenant, "url": url, "events": tuple(event or ()), "secret": secret}
    try:
        endpoint = Endpoint.model_validate(given)
    except ValidationError as error:
        raise typer.BadParameter("; ".join(map(explain, error.errors()))) from None
    endpoint = _with_store(lambda store: _create(store, endpoint))
    if json:
        print_json({**_public_fields(endpoint), "secret": secret})
        return
    out.print(secret, soft_wrap=True)
    err.print("store the secret now, because it can't be shown again")
    err.print(f"to delete the endpoint: cellama webhooks delete {endpoint.id}")
    if not url.startswith("https:") and not get_settings().gateway_webhook_private:
        err.print("[yellow]gateways call http:// URLs only if gateway_webhook_private is true[/]")


async def _create(store: EndpointStore, endpoint: Endpoint) -> Endpoint:
    endpoint = endpoint.model_copy(update={"created_at": await store.now()})
    await store.write(endpoint)
    return endpoint


def webhooks_list_command(json: JsonOption = False) -> None:
    """List webhook endpoints with their tenants and events.

    An endpoint that has responded with status 410 is shown as off.

    Example:  cellama webhooks list
    """
    endpoints = _with_store(lambda store: store.all())
    if json:
        print_json([_public_fields(endpoint) for endpoint in endpoints])
        return
    if not endpoints:
        out.print("no endpoints; create one with `cellama webhooks create URL`")
        return
    table = table_of("id", "tenant", "url", "events", "state", title="Webhooks", whole="id")
    for endpoint in endpoints:
        events = ", ".join(endpoint.events) or "all"
        table.add_row(endpoint.id, escape(endpoint.tenant), escape(endpoint.url), events, endpoint.state)
    out.print(table)


def webhooks_delete_command(
    endpoint_id: Annotated[
        str, typer.Argument(metavar="ENDPOINT_ID", help="Endpoint id, as shown by `cellama webhooks list`.")
    ],
    json: JsonOption = False,
) -> None:
    """Delete an endpoint and drop its pending retries.

    Example:  cellama webhooks delete we_0f3a9c1d2b4e5f60
    """
    if not _with_store(lambda store: store.delete(endpoint_id)):
        raise typer.BadParameter(f"unknown endpoint {endpoint_id!r}; list the endpoints with `cellama webhooks list`")
    if json:
        print_json({"id": endpoint_id, "deleted": True})
    else:
        out.print(f"deleted endpoint {endpoint_id}")


def _public_fields(endpoint: Endpoint) -> dict[str, Any]:
    """Return an endpoint's fields, except its secret."""
    return endpoint.model_dump(mode="json", exclude={"secret"})


def _with_store(action: Callable[[EndpointStore], Awaitable[_T]]) -> _T:
    return with_redis(lambda redis: action(EndpointStore(redis)))
