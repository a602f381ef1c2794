"""The command that tells Prometheus what belongs to no worker: metrics."""

from __future__ import annotations

import signal
import threading
from typing import Annotated

import typer

from cellama.api.cli.output import err, url_of
from cellama.api.machine.redis_server import LOOPBACK, PortTaken
from cellama.tasks.connection.connections import connect
from cellama.tasks.contract.codes import Exit

from .services import NotInstalled, RedisOption, apply

METRICS_PORT = 9465
SOCKET_TIMEOUT_S = 2.0  # less than Prometheus waits, also where it asks every 5 s


def metrics_command(
    host: Annotated[str, typer.Option(help="Address to listen on; whoever reaches it reads it.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = METRICS_PORT,
    redis: RedisOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print the figures once, and end.")] = False,
) -> None:
    """Tell Prometheus of queues, ledger, bulk runs and tenants: run one per Redis.

    Workers tell of themselves with the setting metrics_port, the gateway under /metrics. --once fails without Redis.

    Example:  cellama metrics --once
    """
    settings = apply(None, redis)
    try:
        from cellama.api.metrics.scrape import Scrape  # needs an extra
        from cellama.tasks.metrics.exposition import MetricsServer, text_of
    except ImportError:
        raise NotInstalled("metrics need prometheus_client; `pip install 'cellama[metrics]'`") from None
    timeouts = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": SOCKET_TIMEOUT_S}
    with connect(settings.redis_url, **timeouts) as client:
        scrape = Scrape(client)
        if once:
            typer.echo(text_of(scrape()), nl=False)
            raise typer.Exit(Exit.OK if scrape.is_up else Exit.UNREACHABLE)
        try:
            server = MetricsServer(host, port, scrape)
        except OSError as error:
            raise PortTaken(f"port {port} on {host} can't be had: {error}; choose another with --port") from None
        err.print(f"metrics: {url_of(host, port)}/metrics of {settings.redis_url_masked}", markup=False)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        try:
            ended.wait()
        finally:
            server.close()
