"""The commands for webhooks: webhooks create, webhooks list, webhooks delete."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.markup import escape

from cellama.api.webhooks.endpoints import Endpoint, EndpointStore, new_id, new_secret
from cellama.config import get_settings
from cellama.config.settings import explain

from .generation import JsonOption
from .keys import ask_redis
from .output import err, out, print_json, table_of

_T = TypeVar("_T")


def webhooks_create_command(
    url: Annotated[str, typer.Argument(help="URL of the endpoint, https://…, which gateways must reach.")],
    tenant: Annotated[
        str, typer.Option(help="Tenant whose events to send (default: events of requests without a key).")
    ] = "",
    event: Annotated[
        list[str] | None,
        typer.Option("--event", "-e", help="Type of event to send. May be given more than once (default: all)."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Register an endpoint for the ends of batches and responses. Its secret is shown once.

    Calls are signed as in Standard Webhooks, and retried for about three days until the endpoint answers with 2xx.

    Example:  cellama webhooks create https://example.org/hooks --tenant acme --event batch.completed
    """
    secret = new_secret()
    given = {"id": new_id(), "tenant": tenant, "url": url, "events": tuple(event or ()), "secret": secret}
    try:
        endpoint = Endpoint.model_validate(given)
    except ValidationError as error:
        raise typer.BadParameter("; ".join(map(explain, error.errors()))) from None
    endpoint = _with_store(lambda store: _create(store, endpoint))
    if json:
        print_json({**_told(endpoint), "secret": secret})
        return
    out.print(secret, soft_wrap=True)
    err.print(f"this is the only time that the secret is shown; `cellama webhooks delete {endpoint.id}` ends it")
    if not url.startswith("https:") and not get_settings().gateway_webhook_private:
        err.print("[yellow]it starts with http://: only gateways with gateway_webhook_private=true call it[/]")


async def _create(store: EndpointStore, endpoint: Endpoint) -> Endpoint:
    endpoint = endpoint.model_copy(update={"created_at": await store.now()})
    await store.write(endpoint)
    return endpoint


def webhooks_list_command(json: JsonOption = False) -> None:
    """List the endpoints with their tenants and events. One that is off has answered 410.

    Example:  cellama webhooks list
    """
    endpoints = _with_store(lambda store: store.all())
    if json:
        print_json([_told(endpoint) for endpoint in endpoints])
        return
    if not endpoints:
        out.print("there are no endpoints; `cellama webhooks create URL` registers one")
        return
    table = table_of("id", "tenant", "url", "events", "state", title="webhooks", whole="id")
    for endpoint in endpoints:
        events = ", ".join(endpoint.events) or "all"
        table.add_row(endpoint.id, escape(endpoint.tenant), escape(endpoint.url), events, endpoint.state)
    out.print(table)


def webhooks_delete_command(
    endpoint_id: Annotated[
        str, typer.Argument(metavar="ENDPOINT_ID", help="Id of the endpoint, as `cellama webhooks list` shows it.")
    ],
    json: JsonOption = False,
) -> None:
    """Delete an endpoint. Nothing is sent to it any more, including calls that wait for a retry.

    Example:  cellama webhooks delete we_0f3a9c1d2b4e5f60
    """
    if not _with_store(lambda store: store.delete(endpoint_id)):
        raise typer.BadParameter(f"there is no endpoint {endpoint_id!r}; `cellama webhooks list` shows them")
    if json:
        print_json({"id": endpoint_id, "deleted": True})
    else:
        out.print(f"{endpoint_id} hears of nothing any more")


def _told(endpoint: Endpoint) -> dict[str, Any]:
    """Return an endpoint without its secret."""
    return endpoint.model_dump(mode="json", exclude={"secret"})


def _with_store(ask: Callable[[EndpointStore], Awaitable[_T]]) -> _T:
    return ask_redis(lambda redis: ask(EndpointStore(redis)))
