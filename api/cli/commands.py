"""The command line `cellama`. What its exit codes mean is in `tasks/contract/codes.py`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from cellama.api.machine.redis_server import RedisServerError
from cellama.config import SettingsError
from cellama.tasks.contract.codes import EXITS, Exit
from cellama.tasks.contract.errors import JobError

from .batch import (
    batch_cancel_command,
    batch_list_command,
    batch_resume_command,
    batch_run_command,
    batch_status_command,
)
from .bench import bench_command
from .cache import (
    cache_clear_command,
    cache_info_command,
    cache_list_command,
    cache_pin_command,
    cache_unpin_command,
)
from .demo import demo_command
from .embed import embed_command, rerank_command
from .generation import chat_command, generate_command, prefill_command
from .help import HelpfulCommand, group_of_commands
from .jobs import (
    cancel_command,
    dead_list_command,
    dead_requeue_command,
    jobs_cancel_command,
    jobs_follow_command,
    jobs_list_command,
    queue_purge_command,
)
from .keys import keys_create_command, keys_list_command, keys_revoke_command
from .models import (
    adapter_load_command,
    adapter_scale_command,
    adapter_unload_command,
    models_adapters_command,
    models_default_command,
    models_evict_command,
    models_info_command,
    models_list_command,
    models_load_command,
    models_memory_command,
    models_unload_command,
)
from .output import print_error
from .services import NotInstalled, gateway_command, metrics_command, up_command, worker_command
from .status import status_command
from .top import top_command
from .tune import tune_command
from .webhooks import webhooks_create_command, webhooks_delete_command, webhooks_list_command

EPILOGUE = """
Settings come from CELLAMA_* variables or cellama.toml.
Exit codes: {exits}.
""".format(exits=", ".join(f"{code:d} {meaning}" for code, meaning in EXITS.items()))

app = group_of_commands(
    name="cellama",
    help="Run open models on your own machines as a job queue: llama.cpp behind Celery and Redis.",
    epilog=EPILOGUE,
    pretty_exceptions_enable=False,
)
_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo_command,
    "up": up_command,
    "worker": worker_command,
    "gateway": gateway_command,
    "metrics": metrics_command,
    "generate": generate_command,
    "chat": chat_command,
    "prefill": prefill_command,
    "embed": embed_command,
    "rerank": rerank_command,
    "status": status_command,
    "top": top_command,
    "cancel": cancel_command,
    "tune": tune_command,
}


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C ends a command with its own exit code."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None

    return wrapper


def _add(group: typer.Typer, name: str, command: Callable[..., None], **settings: Any) -> None:
    group.command(name, cls=HelpfulCommand, **settings)(_interruptible(command))


for _name, _command in _COMMANDS.items():
    _add(app, _name, _command)
_models = group_of_commands(help="Models on running workers.")
_MODEL_COMMANDS: dict[str, Callable[..., None]] = {
    "list": models_list_command,
    "info": models_info_command,
    "load": models_load_command,
    "unload": models_unload_command,
    "evict": models_evict_command,
    "default": models_default_command,
    "memory": models_memory_command,
    "adapters": models_adapters_command,
}
_ADAPTER_COMMANDS: dict[str, Callable[..., None]] = {
    "load": adapter_load_command,
    "scale": adapter_scale_command,
    "unload": adapter_unload_command,
}
for _name, _command in _MODEL_COMMANDS.items():
    _add(_models, _name, _command)
_adapter = group_of_commands(help="A LoRA adapter of a model.")
for _name, _command in _ADAPTER_COMMANDS.items():
    _add(_adapter, _name, _command)
_models.add_typer(_adapter, name="adapter")
app.add_typer(_models, name="models")
_batch = group_of_commands(help="Bulk runs: a file of lines in, a file of results out.")
_BATCH_COMMANDS: dict[str, Callable[..., None]] = {
    "run": batch_run_command,
    "resume": batch_resume_command,
    "list": batch_list_command,
    "status": batch_status_command,
    "cancel": batch_cancel_command,
}
for _name, _command in _BATCH_COMMANDS.items():
    _add(_batch, _name, _command)
app.add_typer(_batch, name="batch")
_jobs = group_of_commands(help="Jobs that run or wait.")
_add(_jobs, "list", jobs_list_command)
_add(_jobs, "follow", jobs_follow_command)
_add(_jobs, "cancel", jobs_cancel_command)
app.add_typer(_jobs, name="jobs")
_queue = group_of_commands(help="The queue of a model. `cellama status` shows them all.")
_add(_queue, "purge", queue_purge_command)
app.add_typer(_queue, name="queue")
_dead = group_of_commands(help="Jobs that were put aside because their workers died.")
_add(_dead, "list", dead_list_command)
_add(_dead, "requeue", dead_requeue_command)
app.add_typer(_dead, name="dead")
_keys = group_of_commands(help="API keys of the gateway.")
_add(_keys, "create", keys_create_command)
_add(_keys, "list", keys_list_command)
_add(_keys, "revoke", keys_revoke_command)
app.add_typer(_keys, name="keys")
_webhooks = group_of_commands(help="Endpoints that are notified when batches and responses end.")
_add(_webhooks, "create", webhooks_create_command)
_add(_webhooks, "list", webhooks_list_command)
_add(_webhooks, "delete", webhooks_delete_command)
app.add_typer(_webhooks, name="webhooks")
_cache = group_of_commands(help="KV states on disk: the folder cache_dir of this machine's workers.")
_CACHE_COMMANDS: dict[str, Callable[..., None]] = {
    "list": cache_list_command,
    "info": cache_info_command,
    "clear": cache_clear_command,
    "pin": cache_pin_command,
    "unpin": cache_unpin_command,
}
for _name, _command in _CACHE_COMMANDS.items():
    _add(_cache, _name, _command)
app.add_typer(_cache, name="cache")
# Its options are those of the benchmark that it runs.
_PASSED_ON: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
_add(app, "bench", bench_command, context_settings=_PASSED_ON)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cellama {version('cellama')}")
        raise typer.Exit()


@app.callback()
def _options(
    _debug: Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """The command line of cellama."""


def exit_code_of(error: Exception) -> Exit:
    """The exit code that tells what kind of error it was."""
    if isinstance(error, JobError):
        return error.exit_code
    return Exit.USAGE if isinstance(error, SettingsError | NotInstalled) else Exit.FAILED


def main() -> None:
    """Runs the command line. Mistakes end in a message and an exit code, never in a trace."""
    try:
        app()
    except (JobError, SettingsError, NotInstalled, RedisServerError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        print_error(str(error))
        sys.exit(exit_code_of(error))
