"""Measure how much of each turn Claude Code and Codex CLI compute again, also after a worker was killed.

Both programs are installed with npm and run unmodified on a task of several turns with tools. The bundled model is too
small for the task, so its replies are given (bench/models/scripted_replies.py). Everything else is as usual: the
template, the tokens, the KV cache and its reuse. Before one of the turns the worker is killed, and another one starts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, serving
from cellama.bench.models.scripted_replies import PROCESSOR, REPLIES_FILE, ScriptedReply
from cellama.bench.peers.gateway_process import gateway
from cellama.bench.peers.recorder import Exchange, Recorder, recording
from cellama.engine.bundled import TINY_PATH

MODEL = "tiny"
CONTEXT_TOKENS = 60_000  # the first prompt of Claude Code has more than 40,000 tokens of the bundled model
PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
TASK = "Write a program that prints the squares from 1 to 12, check it, and report the sum."
TIMEOUT_S = 900.0  # for a whole task, and for an installation
PAUSE_S = 3.0  # between a turn and the kill, as if a tool ran; an idle worker writes states to disk
REUSED = "lowest share of the previous turn that is reused, in %"
AFTER_KILL = "the same for the turn after the kill"
TARGET = ">= 97"

Call = tuple[str, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    parser.add_argument("--programs", type=Path, help="directory with node_modules (default: a new one)")
    parser.add_argument("--kill-before", type=int, default=7, help="turn before which the worker is killed, or 0")


@dataclass(frozen=True)
class AgentTurn:
    """The usage of one turn. `reused` is the cached share of the previous turn's prompt and reply, in percent."""

    agent: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    reused: float | None


@dataclass(frozen=True)
class CodingAgent:
    """How to run an agent: its command, its environment, and the calls that the model makes."""

    argv: Callable[[str], Sequence[str]]  # of a gateway's URL
    environment: Callable[[str, Path], Mapping[str, str]]  # of a gateway's URL and of a scratch directory
    calls: Callable[[Path], Sequence[Call]]  # of the directory in which it works


def _claude_argv(url: str) -> list[str]:
    return ["claude", "-p", TASK, "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]


def _claude_environment(url: str, home: Path) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(home),
        "IS_SANDBOX": "1",
    }


PROGRAM = "for number in range(1, 13):\n    print(number, number * number)\n"


def _claude_calls(folder: Path) -> list[Call]:
    path = str(folder / "squares.py")
    return [
        ("Bash", {"command": "ls -la", "description": "List files"}),
        ("Write", {"file_path": path, "content": PROGRAM}),
        ("Read", {"file_path": path}),
        ("Bash", {"command": "python3 squares.py", "description": "Run the program"}),
        ("Edit", {"file_path": path, "old_string": "number, number", "new_string": "number, '->', number"}),
        ("Bash", {"command": "python3 squares.py", "description": "Run it again"}),
        ("Bash", {"command": "seq 1 400", "description": "Print a long output"}),
        ("Write", {"file_path": str(folder / "notes.md"), "content": '# Squares\n\n- "quoted" text, \\ and ü\n'}),
        ("Bash", {"command": "cat notes.md; ls no-such-file", "description": "A command that fails"}),
        ("Read", {"file_path": str(folder / "notes.md")}),
        ("Bash", {"command": "python3 -c 'print(sum(n * n for n in range(1, 13)))'", "description": "Add them up"}),
    ]


def _codex_argv(url: str) -> list[str]:
    provider = "model_providers.cellama"
    settings = {
        "model_provider": "cellama",
        "model": MODEL,
        f"{provider}.name": "cellama",
        f"{provider}.base_url": f"{url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "CELLAMA_API_KEY",
    }
    given = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *given, TASK]


def _codex_environment(url: str, home: Path) -> dict[str, str]:
    return {"CODEX_HOME": str(home), "CELLAMA_API_KEY": "none"}


def _codex_calls(folder: Path) -> list[Call]:
    lines = [
        "ls -la",
        f"cat > squares.py <<'END'\n{PROGRAM}END",
        "cat squares.py",
        "python3 squares.py",
        "sed -i \"s/number, number/number, '->', number/\" squares.py",
        "python3 squares.py",
        "seq 1 400",
        "printf '# Squares\\n\\n- \"quoted\" text, \\\\ and ü\\n' > notes.md",
        "cat notes.md; ls no-such-file",
        "cat notes.md",
        "python3 -c 'print(sum(n * n for n in range(1, 13)))'",
    ]
    return [("exec_command", {"cmd": line}) for line in lines]


AGENTS = {
    "claude": CodingAgent(_claude_argv, _claude_environment, _claude_calls),
    "codex": CodingAgent(_codex_argv, _codex_environment, _codex_calls),
}


def run(args: argparse.Namespace) -> Report:
    turns, wrong = list[AgentTurn](), list[str]()
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        programs = (args.programs or _installed(Path(name), args.agents)) / "node_modules" / ".bin"
        for agent in args.agents:
            exchanges, problems = _run_agent(agent, programs, args.kill_before)
            of_agent = _turns(agent, exchanges)
            turns += of_agent
            wrong += problems + [
                f"{agent}: {one.method} {one.path}: {one.status}: {one.answer[:300]}"
                for one in exchanges
                if one.status >= 400 and one.path != "/"
            ]
            ratios |= _ratios(agent, of_agent, args.kill_before)
    return Report([asdict(turn) for turn in turns], ratios, dict.fromkeys(ratios, TARGET), wrong=wrong)


def _installed(folder: Path, agents: Sequence[str]) -> Path:
    (folder / "package.json").write_text("{}")
    argv = ["npm", "install", "--no-audit", "--no-fund", *(PACKAGES[agent] for agent in agents)]
    subprocess.run(argv, cwd=folder, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    return folder


def _run_agent(name: str, programs: Path, kill_before: int) -> tuple[list[Exchange], list[str]]:
    """Run the task, and return all requests of the agent and what went wrong."""
    agent = AGENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        work, home, states = (Path(folder) / part for part in ("work", "home", "states"))
        for directory in (work, home, states):
            directory.mkdir()
        replies = Path(folder) / "replies.json"
        calls = agent.calls(work)
        replies.write_text(json.dumps([asdict(reply) for reply in _replies(calls)]))
        os.environ[REPLIES_FILE] = str(replies)
        model = {"id": MODEL, "source": str(TINY_PATH), "ctx_per_slot": CONTEXT_TOKENS, "n_parallel": 2}
        # The strategy of `Service` kills the worker at long prompts.
        model |= {"logits_processors": [PROCESSOR], "cache_dir": str(states), "batch_strategy": "adaptive"}
        port = free_port()
        with serving(model) as service, gateway(port), recording(port, lambda _: None) as recorder:
            recorder.before = kill = _KillOnce(service, recorder, kill_before)
            outcome = _run_program(agent, programs, recorder.url, work, home)
            exchanges = list(recorder.exchanges)
    num_turns = len(_of_turns(exchanges))
    problems = [f"{name}: {outcome}"] if outcome else []
    if num_turns != len(calls) + 1:
        problems.append(f"{name}: {num_turns} turns instead of {len(calls) + 1}")
    if kill_before and not kill.has_killed:
        problems.append(f"{name}: the worker was not killed")
    return exchanges, problems


def _replies(calls: Sequence[Call]) -> list[ScriptedReply]:
    replies = []
    for number, (name, arguments) in enumerate(calls):
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        said = f"Step {number + 1} of the task.\n" * (number % 2)
        replies.append(ScriptedReply(f"I call {name} next.", f"{said}<tool_call>\n{call}\n</tool_call>"))
    return [*replies, ScriptedReply("All steps are done.", "The sum of the squares is 650.")]


def _run_program(agent: CodingAgent, programs: Path, url: str, work: Path, home: Path) -> str:
    """Run the program until it exits, and return its problem, or an empty text."""
    argv = list(agent.argv(url))
    argv[0] = str(programs / argv[0])
    apart = {key: value for key, value in os.environ.items() if not key.startswith(("CELLAMA_", "PYTHON"))}
    environment = {**apart, **agent.environment(url, home)}
    try:
        done = subprocess.run(
            argv, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"still running after {TIMEOUT_S:g} s"
    if done.returncode or "650" not in done.stdout:
        return f"exit code {done.returncode}: {done.stdout[-600:]} {done.stderr[-600:]}"
    return ""


class _KillOnce:
    """Kills the worker before a turn is passed on, and starts another one. Agents send one turn at a time."""

    def __init__(self, service: Service, recorder: Recorder, turn: int) -> None:
        self._service, self._recorder, self._turn = service, recorder, turn
        self.has_killed = False

    def __call__(self, body: dict[str, Any]) -> None:
        num_done = len(_of_turns(self._recorder.exchanges))
        if self.has_killed or not body.get("tools") or num_done + 1 != self._turn:
            return
        self.has_killed = True
        time.sleep(PAUSE_S)
        [name] = self._service.processes
        self._service.kill(name)
        self._service.start_worker(name)
        self._service.wait_ready()


def _of_turns(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Return the turns of the task, without side requests."""
    return [one for one in exchanges if one.status == 200 and one.body.get("tools") and one.method == "POST"]


def _turns(agent: str, exchanges: Sequence[Exchange]) -> list[AgentTurn]:
    turns: list[AgentTurn] = []
    for number, exchange in enumerate(_of_turns(exchanges), 1):
        prompt, cached, reply = _usage(exchange)
        reused = 100 * cached / (turns[-1].prompt_tokens + turns[-1].reply_tokens) if turns else None
        turns.append(AgentTurn(agent, number, prompt, cached, reply, reused))
    return turns


def _usage(exchange: Exchange) -> tuple[int, int, int]:
    """Return the tokens of the prompt, those of them that were cached, and the tokens of the reply."""
    usage: dict[str, Any] = {}
    for event in exchange.events:
        for place in (event, event.get("message"), event.get("response")):
            usage |= (place or {}).get("usage") or {}
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]


def _ratios(agent: str, turns: Sequence[AgentTurn], kill_before: int) -> dict[str, float]:
    shares = {turn.turn: turn.reused for turn in turns if turn.reused is not None}
    after = {f"{agent}: {AFTER_KILL}": shares.pop(kill_before)} if kill_before in shares else {}
    return ({f"{agent}: {REUSED}": min(shares.values())} if shares else {}) | after
