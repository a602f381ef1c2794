"""Run AIPerf, a public load generator, in a separate environment (https://github.com/ai-dynamo/aiperf).

AIPerf generates coding-agent sessions (`aiperf synthesize agentic-code`), and sends them to a server turn by turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .offline_tools import TOKENIZER, OfflineTool

VERSION = "0.13.0"
BLOCK_TOKENS = 16  # size of the blocks of text that sessions share


class AIPerf:
    """An installed AIPerf, which writes its files into a scratch directory."""

    def __init__(self, tool: OfflineTool) -> None:
        self._tool = tool
        self._scratch = tool.scratch

    @classmethod
    def installed(cls, environment: Path, scratch: Path, model: Path) -> AIPerf:
        """Create the environment and install AIPerf, unless AIPerf is already installed.

        `model` is a GGUF file whose tokenizer AIPerf uses.
        """
        return cls(OfflineTool.installed(environment, [f"aiperf=={VERSION}"], scratch, model))

    def synthesize(self, sessions: int, distributions: Mapping[str, Any], seed: int) -> Path:
        """Generate a coding-agent trace, and return its file."""
        config = self._scratch / "distributions.json"
        config.write_text(json.dumps({"block_size": BLOCK_TOKENS, **distributions}))
        self._tool.run("aiperf", "synthesize", "agentic-code", "--num-sessions", str(sessions), "--config", str(config),
                  "--seed", str(seed), "--output", str(self._scratch / "traces"))  # fmt: skip
        [trace] = (self._scratch / "traces").glob("*/dataset.jsonl")
        return trace

    def replay(self, trace: Path, url: str, model: str, endpoint: str, concurrency: int) -> None:
        """Send all sessions of a trace to a server. Each turn is sent after the reply to the previous turn."""
        num_sessions = len({json.loads(line)["session_id"] for line in trace.read_text().splitlines()})
        self._tool.run("aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", endpoint, "--streaming",
                  "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace", "--no-fixed-schedule",
                  "--isl-block-size", str(BLOCK_TOKENS),
                  "--concurrency", str(concurrency), "--num-sessions", str(num_sessions),
                  "--tokenizer", TOKENIZER, "--output-artifact-dir", str(self._scratch / "artifacts"),
                  "--ui", "none", "--no-gpu-telemetry", "--no-server-metrics")  # fmt: skip
