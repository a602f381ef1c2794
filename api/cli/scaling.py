"""The command `autoscale`, and the options that determine how many workers a pool needs."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer
from redis.exceptions import RedisError

from cellama.config import get_settings
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import reaching_redis
from cellama.tasks.estimates.backlog import pool_demands
from cellama.tasks.estimates.scaling import PoolDemand, PoolScaler, ScalingPolicy, wanted_workers

from .options import JsonOption
from .output import err, out, plural, print_json, table_of

WATCH_S = 2.0  # seconds between two readings, like the heartbeats of the workers
TIMEOUT_S = 5.0  # for Redis to answer
DEFAULTS = ScalingPolicy()
TargetWaitOption = Annotated[
    float, typer.Option(min=1.0, help="Time in seconds in which the workers should finish the waiting jobs.")
]
CoolDownOption = Annotated[
    float, typer.Option(min=0.0, help="Time in seconds without jobs after which a pool needs no workers.")
]
ScaleDownOption = Annotated[
    float,
    typer.Option(min=0.0, help="Time in seconds for which fewer workers must suffice before the number decreases."),
]
StartupOption = Annotated[
    float,
    typer.Option(
        min=0.0, help="Time in seconds until a new worker starts to load its models, such as for a new machine."
    ),
]


def autoscale_command(
    pool: Annotated[str | None, typer.Option(help="Show only this pool.")] = None,
    min_workers: Annotated[int, typer.Option("--min", min=0, help="Minimum number of workers.")] = 0,
    max_workers: Annotated[int, typer.Option("--max", min=0, help="Maximum number of workers.")] = DEFAULTS.max_workers,
    target_wait: TargetWaitOption = DEFAULTS.target_wait_s,
    cool_down: CoolDownOption = DEFAULTS.cool_down_s,
    scale_down: ScaleDownOption = DEFAULTS.scale_down_s,
    startup: StartupOption = 0.0,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Print a line whenever the number changes, until Ctrl-C.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Print how many workers each pool needs to finish the waiting and running jobs in time.

    The number is 0 if there are no jobs. Without --watch, the number reflects only the current jobs, and --scale-down
    has no effect. This command starts and stops no workers.

    Example:  cellama autoscale --max 8 --target-wait 60
    """
    policy = ScalingPolicy(
        min_workers=min_workers,
        max_workers=max(min_workers, max_workers),
        target_wait_s=target_wait,
        cool_down_s=cool_down,
        scale_down_s=scale_down,
    )
    url = get_settings().redis_url
    with reaching_redis(url), connect(url, socket_connect_timeout=TIMEOUT_S, socket_timeout=TIMEOUT_S) as redis:

        def read() -> dict[str, PoolDemand]:
            demands = pool_demands(redis, startup)
            return demands if pool is None else {pool: demands.get(pool, PoolDemand())}

        demands = read()
        if watch:
            _watch(demands, read, policy, json)
        elif json:
            for name, demand in demands.items():
                print_json(_document(name, wanted_workers(demand, policy), demand))
        else:
            table = table_of("pool", "wanted", "workers", "jobs", "backlog", "start", right="wanted, workers, jobs")
            for name, demand in demands.items():
                wanted = wanted_workers(demand, policy)
                table.add_row(
                    name,
                    str(wanted),
                    str(demand.num_workers),
                    str(demand.num_jobs),
                    _seconds(demand.backlog_s),
                    _seconds(demand.start_s),
                )
            out.print(table)


def _watch(demands: dict[str, PoolDemand], read: Any, policy: ScalingPolicy, json: bool) -> None:
    """Print a line for each pool whose number changes. While Redis does not answer, keep the last numbers."""
    scalers: dict[str, PoolScaler] = {}
    shown: dict[str, int] = {}
    while True:
        for name, demand in demands.items():
            wanted = scalers.setdefault(name, PoolScaler(policy)).next(demand, time.monotonic())
            if shown.get(name) != wanted:
                shown[name] = wanted
                _show(name, wanted, demand, json)
        time.sleep(WATCH_S)
        try:
            demands = read()
        except RedisError as error:
            err.print(f"Redis does not answer: {error}", markup=False)


def _show(pool: str, wanted: int, demand: PoolDemand, json: bool) -> None:
    if json:
        print_json(_document(pool, wanted, demand))
        return
    details = [plural(demand.num_workers, "worker"), plural(demand.num_jobs, "job"), _seconds(demand.backlog_s)]
    typer.echo(f"{pool}: {wanted} ({', '.join(details)})")


def _document(pool: str, wanted: int, demand: PoolDemand) -> dict[str, Any]:
    return {"pool": pool, "wanted": wanted, **asdict(demand)}


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} s"
