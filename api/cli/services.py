"""The commands `up`, `worker`, `gateway` and `metrics`, which run services on this machine."""

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

from cellama.api.machine.gpus import GPUS_HELP, visible_gpus, worker_environments
from cellama.api.machine.redis_server import LOOPBACK, PortTaken, RedisServer, RedisServerError, check_port_free
from cellama.api.machine.supervisor import Child, Supervisor, flower_child, gateway_child, worker_child
from cellama.config import ModelSettings, Settings, SettingsError, get_settings
from cellama.config.local_redis import LOOPBACK_HOSTS, URL_FILE, redis_dir, with_stored_password
from cellama.config.redis_url import parse_redis_url
from cellama.tasks.connection.connections import connect
from cellama.tasks.connection.redis_errors import credentials_refused
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import RedisRefused, RedisUnreachable
from cellama.tasks.estimates.scaling import ScalingPolicy
from cellama.tasks.state.registry import live_workers

from .output import called, err, out, url_of
from .scaling import DEFAULTS, CoolDownOption, ScaleDownOption, StartupOption, TargetWaitOption

WORKER_MODULES = ("llama_cpp", "numpy", "jinja2", "psutil", "huggingface_hub")  # modules of the extra `worker`
HTTP_MODULES = ("starlette", "uvicorn", "prometheus_client", "jinja2")  # modules of the extra `http`
START_TIMEOUT_S = 300.0  # time for a large model to load from a slow disk
GATEWAY_TIMEOUT_S = 5.0  # timeout for one response of the gateway
FLOWER_PORT = 5555
ModelsOption = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="Model to serve as ID=SOURCE. Can be repeated."),
]
GpusOption = Annotated[str, typer.Option("--gpus", metavar="all|each|0,1", help=GPUS_HELP)]
RedisOption = Annotated[str | None, typer.Option("--redis", help="Redis URL (default: CELLAMA_REDIS_URL).")]
GATEWAY_PORT = 8000
METRICS_PORT = 9465
SOCKET_TIMEOUT_S = 2.0  # less than the timeout of Prometheus, even if it scrapes every 5 s


class NotInstalled(Exception):
    """The packages of an optional extra are not installed. The error message names the extra."""


def worker_command(model: ModelsOption = None, redis: RedisOption = None, gpus: GpusOption = "all") -> None:
    """Run a worker, which loads models and runs their jobs, or one worker per GPU with `--gpus each`.

    If a worker process crashes, it is restarted. After SIGTERM or Ctrl-C, workers finish their running jobs. A second
    signal hands these jobs over to other workers.

    Example:  cellama worker -m chat=/models/llama-3.2-1b-q8_0.gguf
    """
    settings = apply(model, redis)
    check_installed()
    if not is_reachable(settings.redis_url):
        raise RedisUnreachable(
            f"Redis at {settings.redis_url_masked} does not answer; start Redis, or run `cellama up`, which starts "
            "Redis and a worker"
        )
    supervisor = Supervisor([worker_child(name=name, env=env) for name, env in _workers(gpus).items()])
    with supervisor.handling_signals():
        supervisor.start()
        code = supervisor.run()
        supervisor.stop()
    raise typer.Exit(Exit.USAGE if code == Exit.CONFIG else code)


def up_command(
    model: ModelsOption = None,
    redis: RedisOption = None,
    flower_port: Annotated[int, typer.Option(help="Port on which Flower listens.")] = FLOWER_PORT,
    flower_address: Annotated[
        str, typer.Option(help="Address on which Flower listens. Addresses other than loopback require a password.")
    ] = LOOPBACK,
    flower: Annotated[bool, typer.Option(help="Start Flower to monitor tasks and workers in a browser.")] = True,
    gpus: GpusOption = "all",
    gateway_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Loopback port for the OpenAI-compatible gateway (default: no gateway)."),
    ] = None,
) -> None:
    """Run everything on this machine: a worker, Flower, and Redis unless a Redis server is already reachable.

    Ctrl-C stops everything.

    Example:  cellama up
    """
    settings = apply(model, redis)
    check_installed()
    _check_services(flower_port if flower else None, gateway_port)
    from cellama.tasks.worker.model_loading import check_models  # imports the engine, which takes half a second

    check_models(settings)
    logs = settings.data_dir / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    environments = _workers(gpus)
    with _redis_for(settings) as embedded:
        workers = [
            worker_child(name=name, env=env, log_path=logs / f"{name}.log") for name, env in environments.items()
        ]
        gateway = gateway_child(gateway_port, log_path=logs / "gateway.log") if gateway_port else None
        children = workers if gateway is None else [gateway, *workers]
        if flower:
            children = [*children, _flower(flower_address, flower_port, logs)]
        supervisor = Supervisor(children, [_RedisChild(embedded)] if embedded else [])
        with supervisor.handling_signals():
            supervisor.start()
            try:
                for worker in workers:
                    wait_for_worker(settings.redis_url, worker, supervisor)
                _wait_for_gateway(gateway, gateway_port, supervisor)
                where = _describe_flower(flower_address, flower_port) if flower else None
                _print_ready(settings, embedded, where, gateway_port, logs)
                code = supervisor.run()
            finally:
                err.print("[dim]stopping after running jobs finish; press Ctrl-C again to stop them[/]")
                supervisor.stop()
    raise typer.Exit(code)


def _workers(gpus: str) -> dict[str, dict[str, str]]:
    """Return the environment variables of each worker, keyed by the worker's name. Raises GpuError."""
    names = [] if gpus == "all" else visible_gpus()
    return worker_environments(gpus, names, os.environ)


def _check_services(flower_port: int | None, gateway_port: int | None) -> None:
    """Check that Flower and the gateway can start if they are enabled. Raises NotInstalled or PortTaken."""
    if flower_port is not None:
        if importlib.util.find_spec("flower") is None:
            raise NotInstalled("Flower is not installed; run `pip install 'cellama[flower]'`, or use --no-flower")
        check_port_free(flower_port, "choose another port with --flower-port, or use --no-flower")
    if gateway_port is not None:
        check_http_installed()
        check_port_free(gateway_port, "choose another port with --gateway-port")


class _RedisChild(Child):
    """The embedded Redis as a child process, which the supervisor restarts if it crashes."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__("redis", (), final_codes=(), process=server.process, started_at=time.monotonic())
        self._server = server

    def start(self) -> None:
        self._server.begin()
        self.process, self.started_at = self._server.process, time.monotonic()


def apply(models: list[str] | None, redis: str | None) -> Settings:
    """Set options in the environment so that child processes also use them. Raises SettingsError."""
    if models:
        os.environ["CELLAMA_MODELS"] = ",".join(models)
    if redis:
        os.environ["CELLAMA_REDIS_URL"] = redis
    get_settings.cache_clear()
    return get_settings()


def check_installed() -> None:
    """Raise NotInstalled if a package that workers need is missing."""
    missing = [name for name in WORKER_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalled(f"missing packages: {', '.join(missing)}; run `pip install 'cellama[worker]'`")


def check_http_installed() -> None:
    """Raise NotInstalled if a package that the gateway needs is missing."""
    missing = [name for name in HTTP_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalled(f"missing packages: {', '.join(missing)}; run `pip install 'cellama[http]'`")


def is_reachable(url: str) -> bool:
    """Return whether a Redis server answers at this URL. Raises RedisRefused if Redis rejects the credentials."""
    try:
        with connect(url, socket_connect_timeout=2, socket_timeout=2) as client:
            return bool(client.ping())
    except AuthenticationError as error:
        raise credentials_refused(error) from None
    except RedisError:
        return False


@contextlib.contextmanager
def _redis_for(settings: Settings) -> Iterator[RedisServer | None]:
    """Yield None if the configured Redis answers.

    If Redis does not answer, start an embedded Redis on the same loopback port.
    """
    where = parse_redis_url(settings.redis_url)
    host, port = where.hosts[0] if where.kind == "server" else ("", 0)
    is_local, directory = host in LOOPBACK_HOSTS, redis_dir(settings.data_dir)
    if with_stored_password(where, settings.data_dir) != where and _answers_without_password(host, port):
        (directory / URL_FILE).unlink()  # another server uses the port: the embedded one requires a password
    try:
        is_there = is_reachable(settings.redis_url)
    except RedisRefused as error:
        if not is_local:
            raise
        other = f"redis://{LOOPBACK}:{port + 1}/0"
        raise RedisRefused(f"{error}. To start another Redis, choose another port: --redis {other}") from None
    if is_there:
        yield None
        return
    if not is_local:
        raise RedisUnreachable(
            f"Redis at {settings.redis_url_masked} does not answer, and `cellama up` can start Redis only on loopback; "
            "start Redis at this URL, or unset CELLAMA_REDIS_URL"
        )
    with RedisServer.start(directory, port=port, password=where.password) as server:
        yield server


def _answers_without_password(host: str, port: int) -> bool:
    no_retry = Retry(NoBackoff(), 0)  # a server that requires a password rejects every attempt
    with contextlib.suppress(RedisError), Redis(host=host, port=port, socket_timeout=2, retry=no_retry) as redis:
        return bool(redis.ping())
    return False


def wait_for_worker(url: str, worker: Child, supervisor: Supervisor | None = None) -> None:
    """Wait until the worker serves its models.

    Raises RedisServerError with the end of the worker's log if the worker exits, and KeyboardInterrupt if a stop is
    requested.
    """
    with connect(url) as client:

        def serves() -> bool:
            return any(entry.pid == worker.process.pid for entry in live_workers(client) if worker.process)

        _wait_for(worker, serves, "loading the models …", supervisor)


def _wait_for_gateway(gateway: Child | None, port: int | None, supervisor: Supervisor) -> None:
    """Wait until the gateway can serve requests, if a gateway was started.

    Raises the same errors as `wait_for_worker`.
    """
    if gateway is not None and port is not None:
        _wait_for(gateway, lambda: _is_ready(port), "waiting for the gateway …", supervisor)


def _wait_for(child: Child, is_ready: Callable[[], bool], status: str, supervisor: Supervisor | None) -> None:
    """Wait until a child process is ready.

    Raises RedisServerError if the child exits, and KeyboardInterrupt if a stop is requested.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    with err.status(status):
        while time.monotonic() < deadline:
            if supervisor is not None:
                supervisor.check()
            if is_ready():
                return
            if not child.running:
                if child.process is not None and child.process.returncode == Exit.CONFIG:
                    raise SettingsError(f"the {child.name} did not start: {child.log_tail(1)}")
                raise RedisServerError(f"the {child.name} did not start; end of its log:\n{child.log_tail()}")
            time.sleep(0.05)
    raise RedisServerError(
        f"the {child.name} was not ready after {START_TIMEOUT_S:g} s; end of its log:\n{child.log_tail()}"
    )


def _is_ready(gateway_port: int) -> bool:
    """Return whether the gateway on this port can serve requests."""
    connection = http.client.HTTPConnection(LOOPBACK, gateway_port, timeout=GATEWAY_TIMEOUT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/ready")
        return connection.getresponse().status == HTTPStatus.OK
    return False


def _flower(address: str, port: int, logs: Path) -> Child:
    credentials = _flower_credentials(address)
    environment = {"FLOWER_BASIC_AUTH": credentials} if credentials else {}
    return flower_child(address, port, log_path=logs / "flower.log", env=environment)


def _flower_credentials(address: str) -> str | None:
    """Return USER:PASSWORD from the environment.

    If no credentials are set, return None for a loopback address, and new credentials for other addresses.
    """
    given = os.environ.get("FLOWER_BASIC_AUTH")
    if given or address in (LOOPBACK, "localhost", "::1"):
        return given
    os.environ["FLOWER_BASIC_AUTH"] = f"cellama:{secrets.token_urlsafe(9)}"
    return os.environ["FLOWER_BASIC_AUTH"]


def _describe_flower(address: str, port: int) -> str:
    credentials = os.environ.get("FLOWER_BASIC_AUTH")
    host = socket.gethostname() if address in ("0.0.0.0", "::") else address
    access = f"user:password {credentials}" if credentials else "read-only; set FLOWER_BASIC_AUTH to control jobs"
    return f"{url_of(host, port)}  ({access})"


def _describe_model(model: ModelSettings) -> str:
    return model.id if model.n_parallel is None else f"{model.id} ({model.n_parallel} slots)"


def _print_ready(
    settings: Settings, embedded: RedisServer | None, flower: str | None, gateway_port: int | None, logs: Path
) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_row("[bold]Redis[/]", settings.redis_url_masked + (" (embedded)" if embedded else ""))
    if embedded:
        table.add_row("", f"URL with password in {embedded.data_dir / URL_FILE}")
    table.add_row("[bold]Models[/]", ", ".join(map(_describe_model, settings.models)))
    if flower:
        table.add_row("[bold]Flower[/]", flower)
    if gateway_port:
        table.add_row("[bold]OpenAI API[/]", f"http://{LOOPBACK}:{gateway_port}/v1")
        if settings.gateway_console != "off":
            table.add_row("[bold]Console[/]", f"http://{LOOPBACK}:{gateway_port}/console")
    table.add_row("[bold]Logs[/]", str(logs))
    table.add_row("[bold]Try[/]", f'{called()} generate {settings.default_model.id} "Once upon a time"')
    out.print(Panel(table, title="cellama is up", subtitle="Ctrl-C to stop", expand=False, border_style="green"))
    sys.stdout.flush()


def gateway_command(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Addresses other than loopback require API keys.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = GATEWAY_PORT,
    redis: RedisOption = None,
    openapi: Annotated[bool, typer.Option("--openapi", help="Print the OpenAPI document and exit.")] = False,
) -> None:
    """Serve the OpenAI, Anthropic and Ollama APIs over HTTP. Requests become jobs, which any worker can run.

    Set the base URL to http://127.0.0.1:8000/v1 for OpenAI clients, and to http://127.0.0.1:8000 for other clients.

    Until you create a key with `cellama keys create`, the gateway accepts any key, but only requests from this
    machine.

    The console shows queues and jobs in a browser: http://127.0.0.1:8000/console

    After SIGTERM or Ctrl-C, the gateway lets running requests finish before it exits.

    Example:  cellama gateway --port 8000
    """
    settings = apply(None, redis)
    check_http_installed()
    if openapi:
        from cellama.api.http.app import API_ROUTES
        from cellama.api.http.openapi import document_text

        typer.echo(document_text(API_ROUTES))
        return
    from cellama.api.http.serving import serve  # needs the extra `http`

    check_port_free(port, "choose another port with --port, or another address with --host", host)
    url = url_of(host, port)
    err.print(f"gateway: {url}/v1, Redis {settings.redis_url_masked}", markup=False)
    if settings.gateway_console != "off":
        err.print(f"console: {url}/console", markup=False)
    serve(settings, host, port)


def metrics_command(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anyone who can reach this address can read the metrics.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = METRICS_PORT,
    redis: RedisOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once and exit.")] = False,
    target_wait: TargetWaitOption = DEFAULTS.target_wait_s,
    cool_down: CoolDownOption = DEFAULTS.cool_down_s,
    scale_down: ScaleDownOption = DEFAULTS.scale_down_s,
    startup: StartupOption = 0.0,
) -> None:
    """Serve metrics about queues, leases, bulk runs and tenants for Prometheus.

    Run one instance per Redis server. Workers serve their own metrics if metrics_port is set, and the gateway serves
    its own metrics at /metrics. With --once, the exit code is 3 if Redis does not answer.

    The options for times determine the metric cellama_wanted_workers, as for `cellama autoscale`.

    Example:  cellama metrics --once
    """
    settings = apply(None, redis)
    try:
        from cellama.api.metrics.scrape import Scrape  # needs the extra `metrics`
        from cellama.tasks.metrics.exposition import MetricsServer, text_of
    except ImportError:
        raise NotInstalled("missing packages: prometheus_client; run `pip install 'cellama[metrics]'`") from None
    timeouts = {"socket_timeout": SOCKET_TIMEOUT_S, "socket_connect_timeout": SOCKET_TIMEOUT_S}
    with connect(settings.redis_url, **timeouts) as client:
        policy = ScalingPolicy(target_wait_s=target_wait, cool_down_s=cool_down, scale_down_s=scale_down)
        scrape = Scrape(client, scaling=policy, startup_s=startup)
        if once:
            typer.echo(text_of(scrape()), nl=False)
            raise typer.Exit(Exit.OK if scrape.is_up else Exit.UNREACHABLE)
        try:
            server = MetricsServer(host, port, scrape)
        except OSError as error:
            raise PortTaken(
                f"can't listen on port {port} on {host}: {error}; choose another port with --port"
            ) from None
        err.print(f"metrics: {url_of(host, port)}/metrics, Redis {settings.redis_url_masked}", markup=False)
        stopped = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        try:
            stopped.wait()
        finally:
            server.close()
