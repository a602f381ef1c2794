"""The command that speaks HTTP: gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from cellama.api.cli.output import err
from cellama.api.machine.redis_server import LOOPBACK, check_port_free

from .services import RedisOption, apply, check_http_installed

GATEWAY_PORT = 8000


def gateway_command(
    host: Annotated[str, typer.Option(help="Address to listen on; one that others can reach needs keys.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = GATEWAY_PORT,
    redis: RedisOption = None,
) -> None:
    """Serve OpenAI's API over HTTP: requests become jobs of the queue, whichever workers serve it.

    What speaks OpenAI works with the base URL http://127.0.0.1:8000/v1 and any key. SIGTERM or Ctrl-C lets running
    requests finish.

    Example:  cellama gateway --port 8000
    """
    settings = apply(None, redis)
    check_http_installed()
    from cellama.api.http.serving import serve  # only this command needs it, and an extra

    if host == LOOPBACK:
        check_port_free(port, "choose another with --port")
    err.print(f"gateway: http://{host}:{port}/v1 in front of {settings.redis_url_masked}", markup=False)
    serve(settings, host, port)
