"""Test the command line: help, exit codes, errors without tracebacks, and light imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cellama.api.cli import app
from cellama.api.cli.commands import exit_code_of
from cellama.config import SettingsError
from cellama.tasks.contract.codes import Exit
from cellama.tasks.contract.errors import (
    InvalidJob,
    JobFailed,
    JobTimeout,
    RedisFull,
    RedisUnreachable,
    UnknownModel,
)
from cellama.tasks.contract.kinds.generate import GenerateJob

from ....conftest import clean_environment

ROOT = Path(__file__).parents[4]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMMANDS = (
    "demo",
    "doctor",
    "up",
    "worker",
    "gateway",
    "generate",
    "chat",
    "embed",
    "rerank",
    "status",
    "cancel",
    "tune",
    "bench",
    "dead list",
    "dead requeue",
    "jobs list",
    "jobs follow",
    "jobs cancel",
    "queue purge",
)
COMMANDS += tuple(f"models {name}" for name in ("list", "info", "load", "unload", "default", "memory"))
COMMANDS += tuple(f"cache {name}" for name in ("list", "info", "clear", "pin", "unpin"))
COMMANDS += tuple(f"keys {name}" for name in ("create", "list", "revoke"))
COMMANDS += tuple(f"batch {name}" for name in ("run", "resume", "list", "status", "cancel"))


def run_cli(*argv: str, folder: Path, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command in another process. No Redis listens at its URL."""
    environment = clean_environment(**{"CELLAMA_REDIS_URL": "redis://127.0.0.1:1/0", "COLUMNS": "200", **variables})
    command = [sys.executable, "-c", "from cellama.api.cli import main; main()", *argv]
    return subprocess.run(command, cwd=folder, env=environment, input=stdin, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert f"cellama {command}" in result.output
    assert "Example:" in result.output


def test_every_generation_parameter_is_an_option() -> None:
    output = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    for name in GenerateJob.model_fields.keys() - {"model", "prompt", "stream", "input_extra"}:
        flag = {"adapters": "adapter ", "stop_token_ids": "stop-token-id "}.get(name, name.replace("_", "-"))
        assert f"--{flag}" in output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidJob("x"), Exit.USAGE),
        (SettingsError("x"), Exit.USAGE),
        (JobFailed("prompt_too_long", "x"), Exit.USAGE),
        (JobFailed("decode_failed", "x", True), Exit.FAILED),
        (JobFailed("timeout", "x"), Exit.TIMEOUT),
        (OSError("x"), Exit.FAILED),
        (RedisUnreachable("x"), Exit.UNREACHABLE),
        (RedisFull("x"), Exit.UNREACHABLE),
        (UnknownModel("x"), Exit.UNREACHABLE),
        (JobTimeout("x"), Exit.TIMEOUT),
    ],
)
def test_exit_code_depends_on_the_type_of_error(error: Exception, code: Exit) -> None:
    assert exit_code_of(error) == code


SEVERAL = """
import contextlib, io, json, sys
from cellama.api.cli import main

def ended(argv):
    sys.argv[1:], text = argv, io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main()
        except SystemExit as end:
            return end.code, text.getvalue()

print(json.dumps([ended(argv) for argv in json.load(sys.stdin)]))
"""
NO_REDIS = {"CELLAMA_REDIS_URL": "redis://127.0.0.1:1/0"}
Mistake = tuple[list[str], int, str]  # arguments, exit code, what the message has


@pytest.mark.parametrize(
    ("variables", "mistakes"),
    [
        (
            NO_REDIS,
            [
                (["generate", "tiny", "Hi"], 3, "Redis at redis://127.0.0.1:1/0 does not answer"),
                (["worker"], 3, "does not answer; start Redis, or run `cellama up`, which starts Redis and a worker"),
                (["generate", "tiny", "Hi", "--max-tokens", "0"], 2, "max_tokens is 0"),
                (["generate", "tiny", "Hi", "--temperature", "-1"], 2, "temperature is -1.0"),
                (["generate", "tiny", "Hi", "--max-tokens", "many"], 2, "valid integer"),
                (["generate", "tiny", ""], 2, "prompt is '': the text is empty"),
                (["generate", "tiny"], 2, "Missing argument"),
                (["generate", "tiny", "Hi", "--max-token", "3"], 2, "--max-tokens"),
                (["genrate"], 2, "genrate"),
                (["up", "--redis", "redis://db.invalid:1/0"], 3, "can start Redis only on loopback"),
            ],
        ),
        ({"CELLAMA_REDIS_URL": "redis://:secret@127.0.0.1:1/0"}, [(["status"], 3, "redis://:***@127.0.0.1:1/0")]),
        ({**NO_REDIS, "CELLAMA_REDIS_ULR": "x"}, [(["status"], 2, "did you mean CELLAMA_REDIS_URL?")]),
        ({**NO_REDIS, "CELLAMA_CONFIG": "nowhere.toml"}, [(["status"], 2, "does not exist")]),
    ],
)
def test_wrong_usage_prints_a_message_and_sets_the_exit_code(
    tmp_path: Path, variables: dict[str, str], mistakes: list[Mistake]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        cwd=tmp_path,
        env=clean_environment(**variables),
        input=json.dumps([argv for argv, _, _ in mistakes]),
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for (code, output), (argv, expected, message) in zip(json.loads(done.stdout), mistakes, strict=True):
        assert (code, message in output) == (expected, True), f"{argv}: {output}"
        assert "Traceback" not in output
        assert "secret" not in output


def test_ctrl_c_during_imports_exits_without_output(tmp_path: Path) -> None:
    (tmp_path / "cellama" / "api").mkdir(parents=True)
    (tmp_path / "cellama" / "api" / "cli.py").write_text("raise KeyboardInterrupt")
    environment = clean_environment(PYTHONPATH=str(tmp_path))
    argv = [sys.executable, str(ROOT / "cellama_main.py"), "status"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, timeout=60, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_prompt_from_stdin_must_be_utf8(tmp_path: Path) -> None:
    done = run_cli("generate", "tiny", "-", folder=tmp_path, stdin=b"caf\xe9")
    assert done.returncode == 2
    assert b"stdin is not valid UTF-8 at byte 3" in done.stderr


def test_delay_raises_redis_unreachable_without_redis(tmp_path: Path) -> None:
    code = (
        "from cellama.tasks import generate\nfrom cellama.tasks.contract.errors import RedisUnreachable\n"
        "try:\n    generate.delay('tiny', 'Hi')\nexcept RedisUnreachable as error:\n    print(error)"
    )
    environment = clean_environment(CELLAMA_REDIS_URL="redis://:secret@127.0.0.1:1/0")
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, timeout=60, text=True)
    assert done.stdout.startswith("Redis at redis://:***@127.0.0.1:1/0 does not answer"), done.stderr


IMPORTS = """
import json, sys
import {module}
print(json.dumps([name for name in ("llama_cpp", "numpy", "jinja2", "cellama.engine") if name in sys.modules]))
"""


@pytest.mark.parametrize("module", ["cellama.tasks", "cellama.api"])
def test_import_loads_neither_the_engine_nor_its_packages(module: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", IMPORTS.format(module=module)]
    done = subprocess.run(argv, cwd=tmp_path, env=clean_environment(), capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


def test_batch_run_has_options_for_all_parameters_except_priority() -> None:
    shown = CliRunner().invoke(app, ["batch", "run", "--help"], env={"COLUMNS": "200"}).output
    assert "--max-tokens" in shown
    assert "--priority" not in shown


@pytest.mark.parametrize("command", [["worker"], ["up"], ["demo"], ["tune", "bundled://tiny"]])
def test_command_reports_missing_packages_once_when_the_worker_extra_is_not_installed(
    command: list[str], tmp_path: Path
) -> None:
    code = (
        "import sys\nfor name in ('llama_cpp', 'jinja2'):\n    sys.modules[name] = None\n"
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('llama_cpp', 'jinja2') else find(name, *a)\n"
        "from cellama.api.cli import main\nmain()"
    )
    environment = clean_environment(CELLAMA_REDIS_URL="redis://127.0.0.1:1/0", COLUMNS="200")
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert done.returncode == Exit.USAGE
    assert done.stderr.count("missing packages: llama_cpp, jinja2; run `pip install 'cellama[worker]'`") == 1
    assert "Traceback" not in done.stderr


def test_bench_shows_help_and_rejects_an_unknown_bundled_model(tmp_path: Path) -> None:
    shown = run_cli("bench", "decode", "--help", folder=tmp_path)
    assert shown.returncode == 0
    assert b"usage: cellama bench decode" in shown.stdout
    assert b"--slots" in shown.stdout
    refused = run_cli("bench", "decode", "--model", "bundled://tinny", folder=tmp_path)
    assert refused.returncode == 2
    assert b"bundled file 'tinny' does not exist; did you mean 'tiny'" in refused.stderr
    assert b"Traceback" not in refused.stderr
