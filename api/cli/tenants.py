"""`cellama tenants`: list the tenants with waiting jobs, and set the weights of their shares."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from cellama.api.client.client import CONNECT_TIMEOUT_S
from cellama.config import limits
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.contract.errors import InvalidJob
from cellama.tasks.contract.fairness import check_fairness_key
from cellama.tasks.state.fair_shares import set_weight, waiting_shares, weights

from .options import JsonOption
from .output import out, print_json, table_of


def tenants_list_command(json: JsonOption = False) -> None:
    """List the fairness keys with waiting jobs, and the weights that differ from 1.

    Example:  cellama tenants list
    """
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        shares, weight_of = waiting_shares(redis), weights(redis)
    if json:
        print_json({"waiting": [asdict(share) for share in shares], "weights": weight_of})
        return
    table = table_of("tenant", "queue", "priority", "waiting", "weight", right="priority, waiting, weight")
    for share in shares:
        weight = f"{weight_of.pop(share.key, 1.0):g}"
        table.add_row(escape(share.key), escape(share.queue), str(share.priority), str(share.num_waiting), weight)
    for key, other in weight_of.items():
        table.add_row(escape(key), "", "", "0", f"{other:g}")
    out.print(table if table.row_count else "no tenant has waiting jobs or a weight")


def tenants_set_weight_command(
    key: Annotated[str, typer.Argument(help="Fairness key, such as org/team. An empty key means jobs without a key.")],
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
    if number is not None and not 0 < number <= limits.MAX_FAIRNESS_WEIGHT:
        most = f"{limits.MAX_FAIRNESS_WEIGHT:,.0f}"
        raise typer.BadParameter(f"weight: {weight} is not valid; give a number above 0 and up to {most}, or default")
    with reaching_redis(), connect(socket_connect_timeout=CONNECT_TIMEOUT_S) as redis:
        set_weight(redis, key, number)
    out.print(f"weight of {escape(key) or 'jobs without a key'}: {weight}")
