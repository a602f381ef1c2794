"""A model's text can't send control characters to a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cellama.api.machine.redis_server import RedisServer

from ..conftest import PATIENCE_S, WorkerProcess, clean_environment
from ..terminals import Terminal

CELLAMA = (sys.executable, "-c", "from cellama.api.cli import main; main()")
HOSTILE = (
    "A\x1b]0;title\x07B\x1b[8mC\x9b31mD\rE\x7f\tF\nG"  # a title, hidden text, a colour, text that overwrites other text
)
SHOWN = "A]0;titleB[8mC31mDE\tF\nG"
ESCAPES = "".join(f"\\x{ord(char):02x}" if ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 else char for char in HOSTILE)
GRAMMAR = f'root ::= "{ESCAPES}"'
ARGV = ("generate", "tiny", "Once", "--grammar", GRAMMAR, "--max-tokens", "200")


@pytest.fixture
def environment(worker: WorkerProcess, redis_server: RedisServer) -> dict[str, str]:
    return clean_environment(CELLAMA_REDIS_URL=redis_server.url)


def test_text_reaches_a_terminal_without_control_characters(environment: dict[str, str], tmp_path: Path) -> None:
    with Terminal([*CELLAMA, *ARGV], folder=tmp_path, environment=environment) as terminal:
        assert terminal.wait() == 0, terminal.text
    text = terminal.text.replace("\r\n", "\n")  # line ends that the terminal adds
    assert f"{SHOWN}\n" in text
    assert not {"\x07", "\x9b", "\x7f"} & set(text)


def test_json_events_keep_their_text_on_a_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    with Terminal([*CELLAMA, *ARGV, "--json"], folder=tmp_path, environment=environment) as terminal:
        assert terminal.wait() == 0, terminal.text
    lines = [line for line in terminal.text.splitlines() if line.startswith('{"job_id"')]
    assert not {"\x1b", "\x07", "\x9b", "\x7f"} & set("".join(lines))
    events = [json.loads(line) for line in lines]
    assert "".join(event.get("text", "") for event in events if event["type"] == "token") == HOSTILE


def test_text_reaches_a_pipe_unchanged(environment: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run([*CELLAMA, *ARGV], cwd=tmp_path, env=environment, capture_output=True, timeout=PATIENCE_S)
    assert done.stdout.decode() == HOSTILE + "\n"


def test_results_of_a_bulk_run_keep_their_text_on_a_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Once", "grammar": GRAMMAR, "max_tokens": 200}) + "\n")
    argv = [*CELLAMA, "batch", "run", "in.jsonl", "-o", "-", "--model", "tiny"]
    with Terminal(argv, folder=tmp_path, environment=environment) as terminal:
        assert terminal.wait() == 0, terminal.text
    line = next(line for line in terminal.text.splitlines() if line.startswith('{"id"'))
    assert not {"\x1b", "\x07", "\x9b", "\x7f"} & set(line)
    assert json.loads(line)["text"] == HOSTILE
