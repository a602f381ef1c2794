"""`cellama tenants`: list tenants with their jobs and recent service, and set their weights and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cellama.config import limits as bounds
from cellama.tasks.connection.connections import CONNECT_TIMEOUT_S, connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.fairness import check_fairness_key, limit_name
from cellama.tasks.state.fair_shares import limits, num_held, set_limit, set_weight, weights
from cellama.tasks.state.tenants import QueueShare, TenantShare, of_tenant, queue_shares, tenant_shares

from .options import JsonOption
from .output import out, plural, print_json, table_of

NUMBERS = "weight, waiting, running, tokens (1 h), share"
KeyArgument = Annotated[
    str, typer.Argument(help="Fairness key, such as org/team. An empty key stands for jobs without a fairness key.")
]
LimitArgument = Annotated[
    str, typer.Argument(help="Maximum number of jobs, none for no limit, or default to use the workers' settings.")
]


def tenants_list_command(json: JsonOption = False) -> None:
    """List tenants that have jobs, were served in the last hour, or have a weight or a limit.

    Example:  cellama tenants list
    """
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        shares, waiting, weight_of, limit_of = tenant_shares(redis), queue_shares(redis), weights(redis), limits(redis)
        held = {name: num_held(redis, name) for name in limit_of}
    if json:
        print_json(
            {
                "tenants": [asdict(share) for share in shares],
                "waiting": [asdict(share) for share in waiting],
                "weights": weight_of,
                "limits": limit_of,
                "held": held,
            }
        )
        return
    texts = {name: f"{held[name]} of {limit_of[name]}" for name in sorted(limit_of)}
    out.print(tenant_table(shares, limit_texts=texts) if shares else "no tenant has jobs, a weight or a limit")
    for name in texts:
        if name.startswith("/"):
            out.print(f"{escape(name[1:])}: {texts[name]} jobs", soft_wrap=True)


def tenants_show_command(key: KeyArgument, json: JsonOption = False) -> None:
    """Show a tenant and its subkeys, with weights, jobs, service in the last hour, and waiting jobs per queue.

    Example:  cellama tenants show acme
    """
    _check(key)
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        everyone, waiting, weight_of = tenant_shares(redis), queue_shares(redis), weights(redis)
    shares = of_tenant(everyone, key)
    queues = [share for share in waiting if share.key in {each.key for each in shares}]
    total = TenantShare(
        key=key,
        weight=weight_of.get(key, 1.0),
        num_waiting=sum(share.num_waiting for share in shares),
        num_running=sum(share.num_running for share in shares),
        service=sum(share.service for share in shares),
    )
    fraction = total.service / (sum(share.service for share in everyone) or 1.0)
    if json:
        print_json(
            {
                **asdict(total),
                "fraction": fraction,
                "keys": [asdict(share) for share in shares],
                "queues": [asdict(share) for share in queues],
            }
        )
        return
    jobs = f"{plural(total.num_waiting, 'waiting job')}, {total.num_running} running"
    service = f"{total.service:,.0f} tokens in the last hour ({100 * fraction:.0f} % of all)"
    out.print(f"{_name(key)}: weight {total.weight:g}, {jobs}, {service}", soft_wrap=True)
    if len(shares) > 1:
        out.print(tenant_table(shares))
    if queues:
        out.print(_queue_table(queues))


def tenant_table(
    shares: list[TenantShare], max_rows: int | None = None, limit_texts: Mapping[str, str] | None = None
) -> Table:
    """Return the table of tenants, sorted by service in descending order. A limit column is added if limits are set."""
    columns = f"{NUMBERS}, limit" if limit_texts else NUMBERS
    table = table_of("tenant", *columns.split(", "), right=columns)
    total = sum(share.service for share in shares) or 1.0
    for share in shares[:max_rows]:
        table.add_row(
            _name(share.key),
            f"{share.weight:g}",
            str(share.num_waiting),
            str(share.num_running),
            f"{share.service:,.0f}",
            f"{100 * share.service / total:.0f} %",
            *([limit_texts.get(share.key, "")] if limit_texts else []),
        )
    return table


def _queue_table(queues: list[QueueShare]) -> Table:
    table = table_of("queue", "priority", "tenant", "waiting", right="priority, waiting")
    for share in queues:
        table.add_row(escape(share.queue), str(share.priority), _name(share.key), str(share.num_waiting))
    return table


def _name(key: str) -> str:
    return escape(key) or "[dim]jobs without a key[/]"


def _check(key: str) -> None:
    try:
        check_fairness_key(key)
    except InvalidJob as error:
        raise typer.BadParameter(str(error)) from None


def tenants_set_weight_command(
    key: KeyArgument,
    weight: Annotated[
        str, typer.Argument(help="Weight above 0, or default to use the weight from the workers' settings.")
    ],
) -> None:
    """Set the weight of a tenant's share on all workers, effective immediately.

    Example:  cellama tenants set-weight acme 3
    """
    _check(key)
    try:
        number = None if weight == "default" else float(weight)
    except ValueError:
        number = 0.0
    if number is not None and not 0 < number <= bounds.MAX_FAIRNESS_WEIGHT:
        most = f"{bounds.MAX_FAIRNESS_WEIGHT:,.0f}"
        raise typer.BadParameter(f"weight: {weight} is not valid; use a number above 0 and up to {most}, or default")
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        set_weight(redis, key, number)
    out.print(f"weight of {escape(key) or 'jobs without a key'}: {weight}")


def tenants_set_limit_command(key: KeyArgument, limit: LimitArgument) -> None:
    """Set the maximum number of a tenant's jobs that all workers together may hold, effective immediately.

    Example:  cellama tenants set-limit acme 4
    """
    try:
        check_fairness_key(key)
    except InvalidJob as error:
        raise typer.BadParameter(str(error)) from None
    _set_limit(limit_name(key), limit)
    out.print(f"limit of {escape(key) or 'jobs without a key'}: {limit}")


def queue_set_limit_command(
    model: Annotated[str, typer.Argument(help="Id of the model whose jobs are limited.")], limit: LimitArgument
) -> None:
    """Set the maximum number of a model's jobs that all workers together may hold, effective immediately.

    Example:  cellama queue set-limit tiny 8
    """
    _set_limit(limit_name(model=model), limit)
    out.print(f"limit of {escape(model)}: {limit}")


def _set_limit(name: str, limit: str) -> None:
    words: dict[str, int | None] = {"none": 0, "default": None}
    try:
        number = words[limit] if limit in words else int(limit)
    except ValueError:
        number = 0
    if limit not in words and not 0 < (number or 0) <= bounds.MAX_COUNT:
        raise typer.BadParameter(f"limit: {limit} is not valid; use a number of jobs (at least 1), none, or default")
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        set_limit(redis, name, number)
