"""Run AIPerf, a public load generator, in a separate environment (https://pypi.org/project/aiperf).

AIPerf generates coding-agent sessions (`aiperf synthesize agentic-code`), and sends them to a server turn by turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

VERSION = "0.13.0"
TOKENIZER = "cellama/bench"
_REVISION = "0" * 40
BLOCK_TOKENS = 16  # size of the blocks of text that sessions share
TIMEOUT_S = 1800.0  # for an installation or a run
_METADATA = "tokenizer.ggml."


class AIPerf:
    """An installed AIPerf, which writes its files into a scratch directory.

    AIPerf works offline, because it finds a model's tokenizer in a Hugging Face cache as if the tokenizer had been
    downloaded.
    """

    def __init__(self, environment: Path, scratch: Path, model: Path) -> None:
        self._bin = environment / "bin"
        self._scratch = scratch
        cached = scratch / "huggingface" / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
        for directory in ("refs", f"snapshots/{_REVISION}"):
            (cached / directory).mkdir(parents=True)
        (cached / "refs" / "main").write_text(_REVISION)
        for name, content in tokenizer_files(model).items():
            (cached / "snapshots" / _REVISION / name).write_text(json.dumps(content))

    @classmethod
    def installed(cls, environment: Path, scratch: Path, model: Path) -> AIPerf:
        """Create the environment and install AIPerf, unless AIPerf is already installed.

        `model` is a GGUF file whose tokenizer AIPerf uses.
        """
        if not (environment / "bin" / "aiperf").exists():
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=TIMEOUT_S)
            argv = [str(environment / "bin" / "pip"), "install", "--quiet", f"aiperf=={VERSION}"]
            subprocess.run(argv, check=True, timeout=TIMEOUT_S)
        return cls(environment, scratch, model)

    def synthesize(self, sessions: int, distributions: Mapping[str, Any], seed: int) -> Path:
        """Generate a coding-agent trace, and return its file."""
        config = self._scratch / "distributions.json"
        config.write_text(json.dumps({"block_size": BLOCK_TOKENS, **distributions}))
        self._run("synthesize", "agentic-code", "--num-sessions", str(sessions), "--config", str(config),
                  "--seed", str(seed), "--output", str(self._scratch / "traces"))  # fmt: skip
        [trace] = (self._scratch / "traces").glob("*/dataset.jsonl")
        return trace

    def replay(self, trace: Path, url: str, model: str, endpoint: str, concurrency: int) -> None:
        """Send all sessions of a trace to a server. Each turn is sent after the reply to the previous turn."""
        num_sessions = len({json.loads(line)["session_id"] for line in trace.read_text().splitlines()})
        self._run("profile", "--model", model, "--url", url, "--endpoint-type", endpoint, "--streaming",
                  "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--no-fixed-schedule",
                  "--isl-block-size", str(BLOCK_TOKENS),
                  "--concurrency", str(concurrency), "--num-sessions", str(num_sessions),
                  "--tokenizer", TOKENIZER, "--output-artifact-dir", str(self._scratch / "artifacts"),
                  "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics")  # fmt: skip

    def _run(self, *arguments: str) -> None:
        """Run an AIPerf command. Raises RuntimeError with the end of the command's output if the command fails."""
        apart = {key: value for key, value in os.environ.items() if not key.startswith(("CELLAMA_", "PYTHON"))}
        environment = {**apart, "HF_HOME": str(self._scratch / "huggingface"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(self._bin / "aiperf"), *arguments],
            cwd=self._scratch, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"aiperf {arguments[0]} failed with exit code {done.returncode}: {done.stdout[-3000:]}")


def tokenizer_files(model: Path) -> dict[str, Any]:
    """Return the byte-level BPE tokenizer of a GGUF file as the files that Hugging Face's libraries read."""
    reader = gguf.GGUFReader(model)
    tokens: Sequence[str] = reader.fields[f"{_METADATA}tokens"].contents()
    merges: Sequence[str] = reader.fields[f"{_METADATA}merges"].contents()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bpe = {"type": "BPE", "vocab": {token: number for number, token in enumerate(tokens)}, "merges": list(merges)}
    stages = {"model": bpe, "pre_tokenizer": byte_level, "decoder": byte_level, "added_tokens": []}
    others = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "Ċ", "eos_token": "Ċ"}  # between texts
    return {"tokenizer.json": {"version": "1.0", **others, **stages}, "tokenizer_config.json": kind, "config.json": {}}
