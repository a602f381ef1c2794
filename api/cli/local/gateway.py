"""The command that speaks HTTP: gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from cellama.api.cli.output import err, url_of
from cellama.api.machine.redis_server import LOOPBACK, check_port_free

from .services import RedisOption, apply, check_http_installed

GATEWAY_PORT = 8000


def gateway_command(
    host: Annotated[str, typer.Option(help="Address to listen on; one that others can reach needs keys.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = GATEWAY_PORT,
    redis: RedisOption = None,
) -> None:
    """Serve OpenAI's and Anthropic's API over HTTP: requests become jobs of the queue, whichever workers serve it.

    What speaks OpenAI gets the base URL http://127.0.0.1:8000/v1, what speaks Anthropic the same without /v1.

    As long as `cellama keys create` has made no key, any will do, and only this machine is served.

    SIGTERM or Ctrl-C lets running requests finish.

    Example:  cellama gateway --port 8000
    """
    settings = apply(None, redis)
    check_http_installed()
    from cellama.api.http.serving import serve  # only this command needs it, and an extra

    check_port_free(port, "choose another with --port, or another address with --host", host)
    err.print(f"gateway: {url_of(host, port)}/v1 in front of {settings.redis_url_masked}", markup=False)
    serve(settings, host, port)
