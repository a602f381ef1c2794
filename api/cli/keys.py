"""`cellama keys`: create, list and revoke the gateway's API keys."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from redis.asyncio import Redis
from rich.markup import escape

from cellama.api.keys.entry import KeyEntry, KeyText
from cellama.api.keys.managing import InvalidKeyField, as_toml, create_key, revoke_key, seconds_of
from cellama.api.keys.store import KeyFile, KeyLookup, KeyStore
from cellama.config import get_settings
from cellama.tasks.connection.connections import CONNECT_TIMEOUT_S, connect_async
from cellama.tasks.connection.redis_errors import reaching_redis

from .options import JsonOption
from .output import err, out, print_json, readable_time, table_of

_T = TypeVar("_T")


def keys_create_command(
    tenant: Annotated[
        str,
        typer.Argument(
            help="Tenant that owns the key. Keys of the same tenant share cached prefixes, files and responses."
        ),
    ],
    name: Annotated[str, typer.Option(help="Key name shown in `cellama keys list`.")] = "",
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Model that requests may use. Can be repeated (default: all)."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", help="LoRA adapter that requests may use. Can be repeated (default: all)."),
    ] = None,
    no_adapters: Annotated[
        bool, typer.Option("--no-adapters", help="Reject requests that specify an adapter.")
    ] = False,
    priority: Annotated[
        str | None,
        typer.Option(
            help="Highest service tier that requests may use, which is also their default: flex, default or priority."
        ),
    ] = None,
    admin: Annotated[
        bool, typer.Option("--admin", help="Allow the key's owner to see all tenants and manage keys in the console.")
    ] = False,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Maximum number of requests in any 60-second period.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Maximum number of tokens, including prompts, in any 60-second period.")
    ] = None,
    concurrent_jobs: Annotated[int | None, typer.Option(help="Maximum number of simultaneous jobs.")] = None,
    expires_in: Annotated[
        str | None, typer.Option(help="Lifetime of the key, for example 30m, 12h, 90d or 4w (default: unlimited).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Create an API key for the gateway and print it. Only a digest is stored, so the key can't be shown again.

    Clients send the key as `Authorization: Bearer KEY` or `x-api-key: KEY`. Without options, a key has no limits.

    If CELLAMA_GATEWAY_KEYS_FILE names a file, the key is not stored in Redis. The command prints an entry to add to
    that file.

    Example:  cellama keys create acme --model tiny --requests-per-minute 60
    """
    if adapter and no_adapters:
        raise typer.BadParameter("--adapter and --no-adapters can't be combined; use one of them")
    fields: dict[str, Any] = {
        "tenant": tenant,
        "name": name,
        "models": model or None,
        "adapters": [] if no_adapters else adapter or None,
        "priority": priority,
        "admin": admin,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_jobs": concurrent_jobs,
    }
    is_stored, lifetime_s = get_settings().gateway_keys_file is None, _seconds_of(expires_in)
    try:
        key, entry = _with_store(lambda store: create_key(store, fields, lifetime_s, is_stored=is_stored))
    except InvalidKeyField as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        print_json({"key": key.text, **entry.model_dump(mode="json")})
    else:
        _show(key, entry)


def _show(key: KeyText, entry: KeyEntry) -> None:
    file = get_settings().gateway_keys_file
    out.print(key.text, soft_wrap=True)
    if file is None:
        err.print(f"store the key now, because it can't be shown again; to revoke it: cellama keys revoke {entry.id}")
    else:
        err.print(f"store the key now, because it can't be shown again; to activate it, add these lines to {file}:")
        out.print(as_toml(entry), markup=False, soft_wrap=True)


def keys_list_command(json: JsonOption = False) -> None:
    """List the gateway's API keys with their tenants, limits and last-used times.

    Example:  cellama keys list
    """
    found = _with_store(lambda store: store.all(), get_settings().gateway_keys_file)
    if json:
        print_json([_public_fields(key) for key in found])
        return
    if not found:
        out.print("no API keys; create one with `cellama keys create TENANT`")
        return
    columns = ("id", "tenant: name", "models", "tier", "limits", "state", "last used")
    table = table_of(*columns, whole="id, limits, last used", title="API keys")
    for key in found:
        table.add_row(*map(escape, _cells(key)))
    out.print(table)


def _cells(key: KeyLookup) -> Iterator[str]:
    """Yield the cells of a key's table row. Long cells wrap on an 80-column terminal."""
    entry = key.entry
    assert entry is not None
    yield entry.id
    owner = f"{entry.tenant}: {entry.name}" if entry.name else entry.tenant
    yield f"{owner} (admin)" if entry.admin else owner
    yield ", ".join(sorted(entry.models or ())) or "all"
    yield entry.priority or ""
    yield "\n".join(_limits(entry)) or "none"
    yield entry.state(key.now)
    yield "never" if key.used_at is None else "\n".join(readable_time(key.used_at)[:16].split())


def keys_revoke_command(
    key_id: Annotated[
        str, typer.Argument(metavar="KEY_ID", help="Key id as shown by `cellama keys list`, or the key itself.")
    ],
    json: JsonOption = False,
) -> None:
    """Revoke an API key. New requests with the key are rejected, but running requests can finish.

    Example:  cellama keys revoke 4k2m9x0c7d1a
    """
    file = get_settings().gateway_keys_file
    if file is not None:
        raise typer.BadParameter(f"the keys are in the file {file}; delete the entry there, or set its `revoked_at`")
    revoked = _with_store(lambda store: revoke_key(store, key_id))
    if revoked.entry is None:
        raise typer.BadParameter("no API key has this id; list the keys with `cellama keys list`")
    if json:
        print_json(_public_fields(revoked))
    else:
        out.print(f"revoked key {revoked.entry.id} of tenant {revoked.entry.tenant}")


def _with_store(action: Callable[[KeyStore], Awaitable[_T]], file: Path | None = None) -> _T:
    """Run an action on the keys in Redis, or on the keys in `file`, and return the action's result."""
    return with_redis(lambda redis: action(KeyStore(redis, None if file is None else KeyFile(file))))


def _public_fields(found: KeyLookup) -> dict[str, Any]:
    assert found.entry is not None
    facts = found.entry.model_dump(mode="json", exclude={"digest"})
    used_at = None if found.used_at is None else datetime.fromtimestamp(found.used_at, UTC).isoformat()
    return {**facts, "state": found.entry.state(found.now), "used_at": used_at}


def _limits(entry: KeyEntry) -> Iterator[str]:
    limits = {
        "req/min": entry.requests_per_minute,
        "tok/min": entry.tokens_per_minute,
        "jobs": entry.concurrent_jobs,
    }
    yield from (f"{limit} {unit}" for unit, limit in limits.items() if limit is not None)
    if entry.expires_at is not None:
        yield f"until {readable_time(entry.expires_at.timestamp())[:10]}"


def _seconds_of(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return seconds_of(text)
    except InvalidKeyField as error:
        raise typer.BadParameter(str(error), param_hint="--expires-in") from None


def with_redis(action: Callable[[Redis], Awaitable[_T]]) -> _T:
    """Run an action with a connection to Redis, and return the action's result.

    Raises RedisUnreachable or RedisRefused.
    """

    async def run() -> _T:
        async with connect_async(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
            return await action(redis)

    with reaching_redis():
        return asyncio.run(run())
