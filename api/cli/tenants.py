"""`cellama tenants`: list the tenants with waiting jobs, and set the weights of their shares and their limits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from cellama.api.client.client import CONNECT_TIMEOUT_S
from cellama.config import limits as bounds
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.fairness import check_fairness_key, limit_name
from cellama.tasks.state.fair_shares import limits, num_held, set_limit, set_weight, waiting_shares, weights

from .options import JsonOption
from .output import out, print_json, table_of

KeyArgument = Annotated[
    str, typer.Argument(help="Fairness key, such as org/team. An empty key means jobs without a key.")
]
LimitArgument = Annotated[str, typer.Argument(help="Number of jobs, none, or default to use the workers' settings.")]


def tenants_list_command(json: JsonOption = False) -> None:
    """List the fairness keys with waiting jobs, and the weights and limits that are set.

    Example:  cellama tenants list
    """
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        shares, weight_of, limit_of = waiting_shares(redis), weights(redis), limits(redis)
        held = {name: num_held(redis, name) for name in limit_of}
    if json:
        waiting = [asdict(share) for share in shares]
        print_json({"waiting": waiting, "weights": weight_of, "limits": limit_of, "held": held})
        return
    table = table_of(
        "tenant", "queue", "priority", "waiting", "weight", "limit", right="priority, waiting, weight, limit"
    )
    for share in shares:
        weight, limit = f"{weight_of.get(share.key, 1.0):g}", _limit_text(share.key, limit_of, held)
        row = (share.key, share.queue, str(share.priority), str(share.num_waiting), weight, limit)
        table.add_row(*map(escape, row))
    for name in sorted({*weight_of, *limit_of} - {share.key for share in shares}):
        is_queue = name.startswith("/")
        weight, limit = "" if is_queue else f"{weight_of.get(name, 1.0):g}", _limit_text(name, limit_of, held)
        table.add_row(
            *map(escape, ("", name[1:], "", "", "", limit) if is_queue else (name, "", "", "0", weight, limit))
        )
    out.print(table if table.row_count else "no tenant has waiting jobs, a weight or a limit")


def _limit_text(name: str, limit_of: dict[str, int], held: dict[str, int]) -> str:
    return f"{held[name]} of {limit_of[name]}" if name in limit_of else ""


def tenants_set_weight_command(
    key: KeyArgument,
    weight: Annotated[str, typer.Argument(help="Weight above 0, or default to use the one in the workers' settings.")],
) -> None:
    """Set the weight of a tenant's share, on all workers and from now on.

    Example:  cellama tenants set-weight acme 3
    """
    try:
        check_fairness_key(key)
        number = None if weight == "default" else float(weight)
    except InvalidJob as error:
        raise typer.BadParameter(str(error)) from None
    except ValueError:
        number = 0.0
    if number is not None and not 0 < number <= bounds.MAX_FAIRNESS_WEIGHT:
        most = f"{bounds.MAX_FAIRNESS_WEIGHT:,.0f}"
        raise typer.BadParameter(f"weight: {weight} is not valid; give a number above 0 and up to {most}, or default")
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        set_weight(redis, key, number)
    out.print(f"weight of {escape(key) or 'jobs without a key'}: {weight}")


def tenants_set_limit_command(key: KeyArgument, limit: LimitArgument) -> None:
    """Set how many jobs of a tenant all workers may hold at the same time, from now on.

    Example:  cellama tenants set-limit acme 4
    """
    try:
        check_fairness_key(key)
    except InvalidJob as error:
        raise typer.BadParameter(str(error)) from None
    _set_limit(limit_name(key), limit)
    out.print(f"limit of {escape(key) or 'jobs without a key'}: {limit}")


def queue_set_limit_command(
    model: Annotated[str, typer.Argument(help="Model whose jobs are limited.")], limit: LimitArgument
) -> None:
    """Set how many jobs of a model all workers may hold at the same time, from now on.

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
        raise typer.BadParameter(f"limit: {limit} is not valid; give a number of jobs from 1, none, or default")
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        set_limit(redis, name, number)
