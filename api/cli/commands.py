"""The table of all commands and the command line's entry point.

`tasks/contract/codes.py` defines the exit codes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main

from cellama.tasks.contract.codes import EXITS, Exit

from .help import HelpfulCommand, group_of_commands

EPILOGUE = """
Settings are read from CELLAMA_* environment variables and from cellama.toml.
Exit codes: {exits}.
""".format(exits=", ".join(f"{code:d} {meaning}" for code, meaning in EXITS.items()))


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it exits with code 130 after Ctrl-C."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(Exit.INTERRUPTED) from None

    return wrapper


# Groups of commands, with their help
_GROUPS = {
    "models": "Load, unload and list models on running workers.",
    "models adapter": "Load, unload and scale LoRA adapters of a model.",
    "batch": "Run every line of a file as a job, and write the results to a file.",
    "jobs": "List, follow and cancel jobs.",
    "queue": "Purge the queue of a model. `cellama status` shows all queues.",
    "dead": "List and requeue dead jobs, whose workers crashed repeatedly.",
    "keys": "Create, list and revoke API keys of the gateway.",
    "tenants": "Show tenants with their jobs and service, and set their weights and limits.",
    "webhooks": "Manage endpoints that are notified when batches and responses finish.",
    "cache": "Manage KV states on disk, in the `cache_dir` of this machine's workers, and explain what a job reused.",
}
# All commands, in the order of the help, as MODULE:FUNCTION. A module is imported when one of its commands is used. To
# add a command, write a function in one of the modules and add it here.
_COMMANDS = {
    "demo": "demo:demo_command",
    "doctor": "doctor:doctor_command",
    "up": "services:up_command",
    "worker": "services:worker_command",
    "gateway": "services:gateway_command",
    "metrics": "services:metrics_command",
    "autoscale": "scaling:autoscale_command",
    "generate": "submitting:generate_command",
    "chat": "submitting:chat_command",
    "prefill": "submitting:prefill_command",
    "embed": "submitting:embed_command",
    "rerank": "submitting:rerank_command",
    "status": "status:status_command",
    "top": "status:top_command",
    "cancel": "jobs:cancel_command",
    "tune": "measuring:tune_command",
    "bench": "measuring:bench_command",
    "models list": "models:models_list_command",
    "models info": "models:models_info_command",
    "models load": "models:models_load_command",
    "models unload": "models:models_unload_command",
    "models evict": "models:models_evict_command",
    "models default": "models:models_default_command",
    "models memory": "models:models_memory_command",
    "models plan": "planning:models_plan_command",
    "models adapters": "models:models_adapters_command",
    "models adapter load": "models:adapter_load_command",
    "models adapter scale": "models:adapter_scale_command",
    "models adapter unload": "models:adapter_unload_command",
    "batch run": "batch:batch_run_command",
    "batch resume": "batch:batch_resume_command",
    "batch list": "batch:batch_list_command",
    "batch status": "batch:batch_status_command",
    "batch cancel": "batch:batch_cancel_command",
    "jobs list": "jobs:jobs_list_command",
    "jobs follow": "jobs:jobs_follow_command",
    "jobs cancel": "jobs:jobs_cancel_command",
    "queue purge": "jobs:queue_purge_command",
    "queue set-limit": "tenants:queue_set_limit_command",
    "dead list": "jobs:dead_list_command",
    "dead requeue": "jobs:dead_requeue_command",
    "keys create": "keys:keys_create_command",
    "keys list": "keys:keys_list_command",
    "keys revoke": "keys:keys_revoke_command",
    "tenants list": "tenants:tenants_list_command",
    "tenants show": "tenants:tenants_show_command",
    "tenants set-weight": "tenants:tenants_set_weight_command",
    "tenants set-limit": "tenants:tenants_set_limit_command",
    "webhooks create": "webhooks:webhooks_create_command",
    "webhooks list": "webhooks:webhooks_list_command",
    "webhooks delete": "webhooks:webhooks_delete_command",
    "cache list": "cache:cache_list_command",
    "cache info": "cache:cache_info_command",
    "cache clear": "cache:cache_clear_command",
    "cache explain": "cache:cache_explain_command",
    "cache pin": "cache:cache_pin_command",
    "cache unpin": "cache:cache_unpin_command",
}
# `bench` passes its options on to the benchmark.
_SETTINGS: dict[str, dict[str, Any]] = {
    "bench": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
}


def _load(path: str) -> Any:
    """Import a command's module, and return the command."""
    module, _, function = _COMMANDS[path].partition(":")
    command = getattr(import_module(f".{module}", __package__), function)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    register = alone.command(path.rpartition(" ")[2], cls=HelpfulCommand, context_settings=_SETTINGS.get(path))
    register(_interruptible(command))
    return typer.main.get_command(alone)


def _group(path: str, **settings: Any) -> typer.Typer:
    """Return a group of commands. `path` is the group's full name, without `cellama`."""
    own = [(name, command) for command in _COMMANDS for parent, _, name in [command.rpartition(" ")] if parent == path]
    return group_of_commands({name: functools.partial(_load, command) for name, command in own}, **settings)


app = _group(
    "",
    name="cellama",
    help="Run open models on your own machines: a job queue with llama.cpp, Celery and Redis.",
    epilog=EPILOGUE,
    pretty_exceptions_enable=False,
)
_groups = {"": app}
for _path, _help in _GROUPS.items():
    _parent, _, _name = _path.rpartition(" ")
    _groups[_path] = _group(_path, help=_help)
    _groups[_parent].add_typer(_groups[_path], name=_name)


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version

        typer.echo(f"cellama {version('cellama')}")
        raise typer.Exit()


@app.callback()
def _options(
    _debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks when errors occur.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run open models as jobs, and manage their workers."""


def exit_code_of(error: Exception) -> Exit | None:
    """Return the exit code for an error, or None if the error is a bug in cellama."""
    from cellama.api.machine.gpus import GpuError
    from cellama.api.machine.redis_server import RedisServerError
    from cellama.config import SettingsError
    from cellama.tasks.contract.errors import JobError

    from .services import NotInstalled

    if isinstance(error, JobError):
        return error.exit_code
    if isinstance(error, SettingsError | NotInstalled | GpuError):
        return Exit.USAGE
    return Exit.FAILED if isinstance(error, RedisServerError | OSError) else None


def main() -> None:
    """Run the command line. Set the exit code, and print errors without a traceback unless `--debug` is given."""
    try:
        app()
    except Exception as error:
        exit_code = exit_code_of(error)
        if exit_code is None or "--debug" in sys.argv:
            raise
        from .output import print_error

        print_error(str(error))
        sys.exit(exit_code)
