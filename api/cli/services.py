"""The commands that run services on this machine: worker, up, gateway, metrics."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import typer
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry
from rich.panel import Panel
from rich.table import Table

from cellama.api.machine.redis_server import LOOPBACK, PortTaken, RedisServer, RedisServerError, check_port_free
from cellama.api.machine.supervisor import Child, Supervisor, flower_child, gateway_child, worker_child
from cellama.config import ModelSettings, Settings, SettingsError, get_settings
from cellama.config.local_redis import LOOPBACK_HOSTS, URL_FILE, redis_dir, with_kept_password
from cellama.config.redis_url import parse_redis_url
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import credentials_refused
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable
from cellama.tasks.state.registry import live_workers

from .output import called, err, out, url_of

WORKER_MODULES = ("llama_cpp", "numpy", "jinja2", "psutil", "huggingface_hub")  # of the extra `worker`
HTTP_MODULES = ("starlette", "uvicorn", "prometheus_client")  # of the extra `http`
START_TIMEOUT_S = 300.0  # for a large model to load from a slow disk
ANSWER_S = 5.0  # for one answer of the gateway
FLOWER_PORT = 5555
ModelsOption = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="Model to serve, as ID=SOURCE. May be given more than once."),
]
RedisOption = Annotated[str | None, typer.Option("--redis", help="Redis URL (default: CELLAMA_REDIS_URL).")]
GATEWAY_PORT = 8000
METRICS_PORT = 9465
SOCKET_TIMEOUT_S = 2.0  # less than the timeout of Prometheus, even if it scrapes every 5 s


class NotInstalled(Exception):
    """An extra of cellama is not installed. The message names it."""


def worker_command(model: ModelsOption = None, redis: RedisOption = None) -> None:
    """Run a worker, which loads the models and serves their queues. A worker process that dies is replaced.

    SIGTERM or Ctrl-C lets running jobs finish. A second one hands them to other workers.

    Example:  cellama worker -m chat=/models/llama-3.2-1b-q8_0.gguf
    """
    settings = apply(model, redis)
    check_installed()
    if not is_reachable(settings.redis_url):
        raise RedisUnreachable(
            f"Redis at {settings.redis_url_masked} does not answer; start it, or use `cellama up`, which brings one"
        )
    supervisor = Supervisor([worker_child()])
    with supervisor.handling_signals():
        supervisor.start()
        code = supervisor.run()
        supervisor.stop()
    raise typer.Exit(Exit.USAGE if code == Exit.CONFIG else code)


def up_command(
    model: ModelsOption = None,
    redis: RedisOption = None,
    flower_port: Annotated[int, typer.Option(help="Port of Flower.")] = FLOWER_PORT,
    flower_address: Annotated[
        str, typer.Option(help="Address on which Flower listens. Outside loopback it asks for a password.")
    ] = LOOPBACK,
    flower: Annotated[bool, typer.Option(help="Run Flower.")] = True,
    gateway_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of loopback on which to serve OpenAI's API (default: none)."),
    ] = None,
) -> None:
    """Run everything on this machine: Redis (unless one is reachable), a worker and Flower. Ctrl-C stops everything.

    Example:  cellama up
    """
    settings = apply(model, redis)
    check_installed()
    _check_beside(flower_port if flower else None, gateway_port)
    from cellama.tasks.worker.model_loading import check_models  # imports the engine, which takes half a second

    check_models(settings)
    logs = settings.data_dir / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _redis_for(settings) as embedded:
        worker = worker_child(log_path=logs / "worker.log")
        gateway = gateway_child(gateway_port, log_path=logs / "gateway.log") if gateway_port else None
        children = [worker] if gateway is None else [gateway, worker]
        if flower:
            children.append(_flower(flower_address, flower_port, logs))
        supervisor = Supervisor(children, [_RedisChild(embedded)] if embedded else [])
        with supervisor.handling_signals():
            supervisor.start()
            try:
                wait_for_worker(settings.redis_url, worker, supervisor)
                _wait_for_gateway(gateway, gateway_port, supervisor)
                where = _describe_flower(flower_address, flower_port) if flower else None
                _say_ready(settings, embedded, where, gateway_port, logs)
                code = supervisor.run()
            finally:
                err.print("[dim]stopping: running jobs finish first; Ctrl-C again ends them[/]")
                supervisor.stop()
    raise typer.Exit(code)


def _check_beside(flower_port: int | None, gateway_port: int | None) -> None:
    """Check what runs in addition to the worker, unless its port is None. Raises NotInstalled, PortTaken."""
    if flower_port is not None:
        if importlib.util.find_spec("flower") is None:
            raise NotInstalled("Flower is not installed; `pip install 'cellama[flower]'`, or use --no-flower")
        check_port_free(flower_port, "choose another with --flower-port, or use --no-flower")
    if gateway_port is not None:
        check_http_installed()
        check_port_free(gateway_port, "choose another with --gateway-port")


class _RedisChild(Child):
    """The embedded Redis, which a supervisor starts again when it dies."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__("redis", (), final_codes=(), process=server.process, started_at=time.monotonic())
        self._server = server

    def start(self) -> None:
        self._server.begin()
        self.process, self.started_at = self._server.process, time.monotonic()


def apply(models: list[str] | None, redis: str | None) -> Settings:
    """Set options in the environment, so that child processes have them too. Raises SettingsError."""
    if models:
        os.environ["CELLAMA_MODELS"] = ",".join(models)
    if redis:
        os.environ["CELLAMA_REDIS_URL"] = redis
    get_settings.cache_clear()
    return get_settings()


def check_installed() -> None:
    """Raise NotInstalled if a package is missing that workers need."""
    missing = [name for name in WORKER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalled(f"this needs {', '.join(missing)}, as every worker does; `pip install 'cellama[worker]'`")


def check_http_installed() -> None:
    """Raise NotInstalled if the gateway's extra is missing."""
    missing = [name for name in HTTP_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalled(f"the gateway needs {', '.join(missing)}; `pip install 'cellama[http]'`")


def is_reachable(url: str) -> bool:
    """Return whether a Redis answers at this URL. Raises RedisRefused if it refuses the client."""
    try:
        with connect(url, socket_connect_timeout=2, socket_timeout=2) as client:
            return bool(client.ping())
    except AuthenticationError as error:
        raise credentials_refused(error) from None
    except RedisError:
        return False


@contextlib.contextmanager
def _redis_for(settings: Settings) -> Iterator[RedisServer | None]:
    """Yield None if the configured Redis answers, else an embedded one on the same loopback port."""
    where = parse_redis_url(settings.redis_url)
    host, port = where.hosts[0] if where.kind == "server" else ("", 0)
    is_local, directory = host in LOOPBACK_HOSTS, redis_dir(settings.data_dir)
    if with_kept_password(where, settings.data_dir) != where and _answers_without_password(host, port):
        (directory / URL_FILE).unlink()  # that is another server: the embedded one asks for the password
    try:
        is_there = is_reachable(settings.redis_url)
    except RedisRefused as error:
        if not is_local:
            raise
        own = f"redis://{LOOPBACK}:{port + 1}/0"
        raise RedisRefused(f"{error}. To start a Redis of your own, choose another port: --redis {own}") from None
    if is_there:
        yield None
        return
    if not is_local:
        raise RedisUnreachable(
            f"Redis at {settings.redis_url_masked} does not answer, and only a loopback one can be started here; "
            "start it, or unset CELLAMA_REDIS_URL"
        )
    with RedisServer.start(directory, port=port, password=where.password) as server:
        yield server


def _answers_without_password(host: str, port: int) -> bool:
    one_try = Retry(NoBackoff(), 0)  # a server that wants a password says so each time
    with contextlib.suppress(RedisError), Redis(host=host, port=port, socket_timeout=2, retry=one_try) as redis:
        return bool(redis.ping())
    return False


def wait_for_worker(url: str, worker: Child, supervisor: Supervisor | None = None) -> None:
    """Wait until the worker serves its models.

    Raises RedisServerError with the end of its log if it exits, KeyboardInterrupt if a stop is requested.
    """
    with connect(url) as client:

        def serves() -> bool:
            return any(entry.pid == worker.process.pid for entry in live_workers(client) if worker.process)

        _wait_for(worker, serves, "loading the models …", supervisor)


def _wait_for_gateway(gateway: Child | None, port: int | None, supervisor: Supervisor) -> None:
    """Wait until the gateway, if there is one, has a model for requests. Raises what `wait_for_worker` raises."""
    if gateway is not None and port is not None:
        _wait_for(gateway, lambda: _is_ready(port), "waiting for the gateway …", supervisor)


def _wait_for(child: Child, is_ready: Callable[[], bool], what: str, supervisor: Supervisor | None) -> None:
    """Wait for a child. Raises RedisServerError if it exits, KeyboardInterrupt if a stop is requested."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with err.status(what):
        while time.monotonic() < deadline:
            if supervisor is not None:
                supervisor.check()
            if is_ready():
                return
            if not child.running:
                if child.process is not None and child.process.returncode == Exit.CONFIG:
                    raise SettingsError(f"the {child.name} did not start: {child.log_tail(1)}")
                raise RedisServerError(f"the {child.name} did not start; its log ends:\n{child.log_tail()}")
            time.sleep(0.05)
    raise RedisServerError(
        f"the {child.name} was not ready after {START_TIMEOUT_S:g} s; its log ends:\n{child.log_tail()}"
    )


def _is_ready(gateway_port: int) -> bool:
    """Return whether the gateway on this port has a model for requests."""
    asking = http.client.HTTPConnection(LOOPBACK, gateway_port, timeout=ANSWER_S)
    with contextlib.closing(asking), contextlib.suppress(OSError, http.client.HTTPException):
        asking.request("GET", "/ready")
        return asking.getresponse().status == HTTPStatus.OK
    return False


def _flower(address: str, port: int, logs: Path) -> Child:
    credentials = _flower_credentials(address)
    environment = {"FLOWER_BASIC_AUTH": credentials} if credentials else {}
    return flower_child(address, port, log_path=logs / "flower.log", env=environment)


def _flower_credentials(address: str) -> str | None:
    """Return USER:PASSWORD for Flower from the environment, else new ones unless it listens on loopback only."""
    given = os.environ.get("FLOWER_BASIC_AUTH")
    if given or address in (LOOPBACK, "localhost", "::1"):
        return given
    os.environ["FLOWER_BASIC_AUTH"] = f"cellama:{secrets.token_urlsafe(9)}"
    return os.environ["FLOWER_BASIC_AUTH"]


def _describe_flower(address: str, port: int) -> str:
    credentials = os.environ.get("FLOWER_BASIC_AUTH")
    host = socket.gethostname() if address in ("0.0.0.0", "::") else address
    more = (
        f"user:password {credentials}"
        if credentials
        else "to look; FLOWER_BASIC_AUTH=user:password lets it cancel jobs"
    )
    return f"{url_of(host, port)}  ({more})"


def _describe_model(model: ModelSettings) -> str:
    return model.id if model.n_parallel is None else f"{model.id} ({model.n_parallel} slots)"


def _say_ready(
    settings: Settings, embedded: RedisServer | None, flower: str | None, gateway_port: int | None, logs: Path
) -> None:
    table = Table.grid(padding=(0, 2))
    kept = f" (embedded, data in {embedded.data_dir})" if embedded else ""
    table.add_row("[bold]Redis[/]", settings.redis_url_masked + kept)
    table.add_row("[bold]Models[/]", ", ".join(map(_describe_model, settings.models)))
    if flower:
        table.add_row("[bold]Flower[/]", flower)
    if gateway_port:
        table.add_row("[bold]OpenAI's API[/]", f"http://{LOOPBACK}:{gateway_port}/v1")
    table.add_row("[bold]Logs[/]", str(logs))
    table.add_row("[bold]Try[/]", f'{called()} generate {settings.default_model.id} "Once upon a time"')
    out.print(Panel(table, title="cellama is up", subtitle="Ctrl-C ends it", expand=False, border_style="green"))
    sys.stdout.flush()


def gateway_command(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Addresses outside loopback need API keys.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = GATEWAY_PORT,
    redis: RedisOption = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs over HTTP. Requests become jobs, which any worker can run.

    Clients for OpenAI need the base URL http://127.0.0.1:8000/v1, clients for Anthropic the same without /v1.

    Until `cellama keys create` creates a key, any key is accepted, and only this machine is served.

    SIGTERM or Ctrl-C lets running requests finish.

    Example:  cellama gateway --port 8000
    """
    settings = apply(None, redis)
    check_http_installed()
    from cellama.api.http.serving import serve  # only this command needs it, and an extra

    check_port_free(port, "choose another with --port, or another address with --host", host)
    err.print(f"gateway: {url_of(host, port)}/v1 in front of {settings.redis_url_masked}", markup=False)
    serve(settings, host, port)


def metrics_command(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anyone who can reach it can read the metrics.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = METRICS_PORT,
    redis: RedisOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once, and exit.")] = False,
) -> None:
    """Serve metrics of queues, ledger, bulk runs and tenants for Prometheus. Run one per Redis.

    Workers serve their own with the setting metrics_port, and the gateway under /metrics. --once fails without Redis.

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
