"""Measure how much of each turn is recomputed for Claude Code and Codex CLI, with and without reasoning.

Both programs are installed with npm and run unmodified, with all of their tools, on a task of several turns. The
bundled model is too small for the task, so its replies are scripted (bench/models/scripted_replies.py). The template,
the tokens, the KV cache and its reuse work as usual. Before one of the turns, the worker is killed with SIGKILL, and
another worker starts. By default, the model has only one layer, because Claude Code's first prompt has more than 40,000
tokens of the bundled vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, serving
from cellama.bench.models.scripted_replies import PROCESSOR, REPLIES_FILE, ScriptedReply
from cellama.bench.models.templated import write_shallow
from cellama.bench.peers.gateway_process import gateway
from cellama.bench.peers.recorder import Exchange, Recorder, recording

MODEL = "bundled, one layer"
MODEL_ID = "tiny"
SHALLOW = "shallow.gguf"
CONTEXT_TOKENS = 80_000  # the conversation of Claude Code, and a quarter that replay leaves for the answer
PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
TASK = "Write a program that prints the squares from 1 to 12, check it, and report the sum."
TIMEOUT_S = 1800.0  # for a whole task, and for an installation
PAUSE_S = 3.0  # between a turn and the kill, as if a tool ran; an idle worker writes states to disk
REUSED = "lowest share of the previous turn that is reused, in %"
AFTER_KILL = "the same for the turns after a kill"
TARGET = ">= 97"
NUM_SHOWN = 300  # characters of an answer or an error
ON_OFF = ("off", "on")

Call = tuple[str, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    parser.add_argument("--reasoning", nargs="+", choices=ON_OFF, default=list(ON_OFF))
    parser.add_argument("--programs", help="directory with node_modules (default: install the packages with npm)")
    parser.add_argument(
        "--kill-before",
        nargs="*",
        type=int,
        default=[7],
        metavar="TURN",
        help="numbers of the turns before which to kill the worker",
    )
    parser.add_argument(
        "--without-replay",
        action="store_true",
        help="render earlier replies with the chat template instead of replaying them",
    )


@dataclass(frozen=True)
class AgentTurn:
    """The usage of one turn.

    `reused` is the percentage of the previous turn's prompt and reply that was found in the cache. `broken_by` is the
    reason why the prompt does not continue the previous turn, as reported by `cellama cache explain`.
    """

    agent: str
    reasoning: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    reply_tokens: int
    reused: float | None
    tier: str  # of the KV state: device, ram or disk
    broken_by: str


@dataclass(frozen=True)
class CodingAgent:
    """An agent's command and environment, and the tool calls that the scripted model makes."""

    argv: Callable[[str, bool, str], Sequence[str]]  # of a gateway's URL, whether the model reasons, and the task
    environment: Callable[[str, bool, Path], Mapping[str, str]]  # the third argument is a scratch directory
    calls: Callable[[Path], Sequence[Call]]  # of the directory in which it works


def _claude_argv(url: str, reasons: bool, task: str) -> list[str]:
    return ["claude", "-p", task, "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]


def _claude_environment(url: str, reasons: bool, home: Path) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL_ID,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL_ID,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CONFIG_DIR": str(home),
        "IS_SANDBOX": "1",
        **({} if reasons else {"MAX_THINKING_TOKENS": "0"}),
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


def _codex_argv(url: str, reasons: bool, task: str) -> list[str]:
    provider = "model_providers.cellama"
    settings = {
        "model_provider": "cellama",
        "model": MODEL_ID,
        f"{provider}.name": "cellama",
        f"{provider}.base_url": f"{url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "CELLAMA_API_KEY",
        "model_reasoning_effort": "high" if reasons else "none",
    }
    given = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *given, task]


def _codex_environment(url: str, reasons: bool, home: Path) -> dict[str, str]:
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
    turns, wrong, caveats, ratios = list[AgentTurn](), list[str](), list[str](), dict[str, float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        programs = (Path(args.programs) if args.programs else folder) / "node_modules" / ".bin"
        versions = dict[str, str]()
        for agent in args.agents:
            problem = "" if args.programs else _install(folder, agent)
            versions[agent] = "" if problem else _version(programs / agent)
            if not versions[agent]:
                wrong.append(f"{agent} was not measured: {problem or f'{programs / agent} does not start'}")
        available = [agent for agent in args.agents if versions[agent]]
        if not available:
            return Report([], wrong=wrong)
        caveats += [f"{agent}: {versions[agent]}" for agent in available]
        if not args.model:
            write_shallow(folder / SHALLOW)
        with Runs(folder, args.model or folder / SHALLOW, programs, replays=not args.without_replay) as runs:
            for agent, reasoning in itertools.product(available, args.reasoning):
                own, problems, rejected = runs.run(agent, reasoning, args.kill_before)
                turns += own
                wrong += problems
                caveats += rejected
                ratios |= _ratios(f"{agent}, reasoning {reasoning}", own, args.kill_before)
    targets = {} if args.without_replay else dict.fromkeys(ratios, TARGET)
    return Report([asdict(turn) for turn in turns], ratios, targets, caveats=caveats, wrong=wrong)


def _install(folder: Path, agent: str) -> str:
    """Install an agent with npm. Return the reason for a failure, or an empty string after a success."""
    if shutil.which("npm") is None:
        return "npm is not in PATH; install Node.js, or pass --programs"
    if not (folder / "package.json").exists():  # npm removes packages that this file doesn't name
        (folder / "package.json").write_text("{}")
    npm = functools.partial(subprocess.run, cwd=folder, check=True, timeout=TIMEOUT_S, capture_output=True, text=True)
    try:
        # Without a version, npm prefers old versions that support the installed Node.js, but the programs are native.
        version = npm(["npm", "view", PACKAGES[agent], "version"]).stdout.strip()
        npm(["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error", f"{PACKAGES[agent]}@{version}"])
    except subprocess.CalledProcessError as error:
        return f"npm can't install {PACKAGES[agent]}: {error.stderr.strip()[:NUM_SHOWN]}"
    except subprocess.TimeoutExpired:
        return f"npm has not installed {PACKAGES[agent]} within {TIMEOUT_S:g} s"
    return ""


def _version(program: Path) -> str:
    """Return the version that a program prints, or an empty string if the program does not start."""
    try:
        return subprocess.run(
            [program, "--version"], check=True, timeout=60, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Runs:
    """A service with a gateway that agents use one after another. Use this class as a context manager.

    All runs share one directory, so that an agent's instructions are computed only once.
    """

    def __init__(self, folder: Path, source: Path, programs: Path, *, replays: bool) -> None:
        self.programs = programs
        self._work, self._home, self._states = (folder / part for part in ("work", "home", "states"))
        self._replies = folder / "replies.json"
        self._model = {"id": MODEL_ID, "source": str(source), "ctx_per_slot": CONTEXT_TOKENS, "n_parallel": 2}
        # The default strategy, because that of `Service` only serves to count tokens.
        self._model |= {"logits_processors": [PROCESSOR], "cache_dir": str(self._states), "batch_strategy": "adaptive"}
        self._settings = {"replay_replies": str(replays).lower()}
        self._port = free_port()
        self._stack = contextlib.ExitStack()
        self._num_runs = 0

    def __enter__(self) -> Runs:
        os.environ[REPLIES_FILE] = str(self._replies)
        self._states.mkdir()
        self._service = self._stack.enter_context(serving(self._model, settings=self._settings))
        self._stack.enter_context(gateway(self._port))
        self._client = self._stack.enter_context(Client())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self, name: str, reasoning: str, kill_before: Sequence[int]
    ) -> tuple[list[AgentTurn], list[str], list[str]]:
        """Run the task, and return the turns, the problems, and the responses that rejected a request."""
        agent, label = AGENTS[name], f"{name}, reasoning {reasoning}"
        for directory in (self._work, self._home):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        calls = agent.calls(self._work)
        self._replies.write_text(json.dumps([asdict(reply) for reply in _replies(calls)]))
        self._num_runs += 1
        with recording(self._port, lambda _: None) as recorder:
            recorder.before = killer = _Killer(self._service, recorder, kill_before)
            outcome = self._run_program(agent, recorder.url, reasoning == "on")
            exchanges = list(recorder.exchanges)
        turns = self._turns(name, reasoning, exchanges)
        problems = [outcome] if outcome else []
        rejected = [
            f"{label}: rejected with {one.status}: {one.answer.partition('request_id')[0][:NUM_SHOWN]}"
            for one in exchanges
            if one.status >= 400 and one.path != "/"
        ]
        if len(turns) != len(calls) + 1:
            problems.append(f"{len(turns)} turns instead of {len(calls) + 1}")
        if killer.left:
            problems.append(f"the worker was not killed before turn {min(killer.left)}")
        return turns, [f"{label}: {problem}" for problem in problems], list(dict.fromkeys(rejected))

    def _run_program(self, agent: CodingAgent, url: str, reasons: bool) -> str:
        """Run the program until it exits. Return a description of the failure, or an empty string after a success."""
        # Each run has another task, so that it shares only the agent's instructions with the runs before it.
        argv = list(agent.argv(url, reasons, f"{TASK} This is run {self._num_runs}."))
        argv[0] = str(self.programs / argv[0])
        apart = {key: value for key, value in os.environ.items() if not key.startswith(("CELLAMA_", "PYTHON"))}
        try:
            done = subprocess.run(
                argv,
                cwd=self._work,
                env={**apart, **agent.environment(url, reasons, self._home)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"still running after {TIMEOUT_S:g} s"
        if done.returncode or "650" not in done.stdout:
            return f"exit code {done.returncode}: {done.stdout[-NUM_SHOWN:]} {done.stderr[-NUM_SHOWN:]}"
        return ""

    def _turns(self, agent: str, reasoning: str, exchanges: Sequence[Exchange]) -> list[AgentTurn]:
        turns: list[AgentTurn] = []
        for number, exchange in enumerate(_of_turns(exchanges), 1):
            prompt, cached, reply = exchange.usage
            explained = self._client.explain_cache(_answer_id(exchange))
            reused = 100 * cached / (turns[-1].prompt_tokens + turns[-1].reply_tokens) if turns else None
            place = "" if explained.difference is None else f"token {explained.difference.token}: "
            turns.append(
                AgentTurn(
                    agent,
                    reasoning,
                    number,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    reply_tokens=reply,
                    reused=reused,
                    tier=explained.tier or "",
                    broken_by=(place + "; ".join(explained.reasons)) if turns and explained.reasons else "",
                )
            )
        return turns


def _replies(calls: Sequence[Call]) -> list[ScriptedReply]:
    replies = []
    for number, (name, arguments) in enumerate(calls):
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        said = f"Step {number + 1} of the task.\n" * (number % 2)
        reasoning = f"The files are as I expected, so I call {name} in step {number + 1}."
        replies.append(ScriptedReply(reasoning, f"{said}<tool_call>\n{call}\n</tool_call>"))
    return [*replies, ScriptedReply("All steps are done.", "The sum of the squares is 650.")]


class _Killer:
    """Kills the worker before certain turns are forwarded, and starts another worker.

    Agents send one turn at a time.
    """

    def __init__(self, service: Service, recorder: Recorder, turns: Sequence[int]) -> None:
        self.left = set(turns)
        self._service, self._recorder = service, recorder

    def __call__(self, body: dict[str, Any]) -> None:
        turn = len(_of_turns(self._recorder.exchanges)) + 1
        if not body.get("tools") or turn not in self.left:
            return
        self.left.remove(turn)
        time.sleep(PAUSE_S)
        [name] = self._service.processes
        self._service.kill(name)
        self._service.start_worker(name)
        self._service.wait_ready()


def _of_turns(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Return the turns of the task, excluding side requests."""
    return [one for one in exchanges if one.status == 200 and one.body.get("tools") and one.method == "POST"]


def _parts(exchange: Exchange) -> list[dict[str, Any]]:
    """Return the answer's events, and the messages and responses that they contain."""
    return [part for event in exchange.events for part in (event, event.get("message"), event.get("response")) if part]


def _answer_id(exchange: Exchange) -> str:
    ids = (str(part.get("id")) for part in _parts(exchange))
    return next(each for each in ids if each.startswith(("msg_", "resp_")))


def _ratios(label: str, turns: Sequence[AgentTurn], kill_before: Sequence[int]) -> dict[str, float]:
    ratios = {}
    for name, after_kill in ((REUSED, False), (AFTER_KILL, True)):
        shares = [turn.reused for turn in turns if turn.reused is not None and (turn.turn in kill_before) == after_kill]
        if shares:
            ratios[f"{label}: {name}"] = min(shares)
    return ratios
