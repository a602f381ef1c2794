"""Run other projects' Python programs offline, each in a virtual environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

TOKENIZER = "cellama/bench"  # name of the model's tokenizer for the programs
TIMEOUT_S = 1800.0  # for an installation or a run
_REVISION = "0" * 40
_METADATA = "tokenizer.ggml."


class OfflineTool:
    """A virtual environment with programs, which write their files into a scratch directory.

    The programs find a model's tokenizer in a Hugging Face cache, as if the tokenizer had been downloaded.
    """

    def __init__(self, environment: Path, scratch: Path, model: Path) -> None:
        self.scratch = scratch
        self._bin = environment / "bin"
        cached = scratch / "huggingface" / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
        for directory in ("refs", f"snapshots/{_REVISION}"):
            (cached / directory).mkdir(parents=True, exist_ok=True)
        (cached / "refs" / "main").write_text(_REVISION)
        for name, content in tokenizer_files(model).items():
            (cached / "snapshots" / _REVISION / name).write_text(json.dumps(content))

    @classmethod
    def installed(cls, environment: Path, packages: Sequence[str], scratch: Path, model: Path) -> OfflineTool:
        """Create the environment and install the packages, unless this has already been completed.

        `model` is a GGUF file whose tokenizer the programs use. Raises CalledProcessError if an installation fails.
        """
        complete = environment / "installed"
        if not complete.exists() or complete.read_text() != "\n".join(packages):
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=TIMEOUT_S)
            pip = [str(environment / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, *packages], check=True, timeout=TIMEOUT_S)
            complete.write_text("\n".join(packages))
        return cls(environment, scratch, model)

    def run(self, program: str, *arguments: str) -> None:
        """Run a program. Raises RuntimeError with the end of the program's output if the program fails."""
        apart = {key: value for key, value in os.environ.items() if not key.startswith(("CELLAMA_", "PYTHON"))}
        environment = {**apart, "HF_HOME": str(self.scratch / "huggingface"), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            cwd=self.scratch, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} {arguments[0]} failed with code {done.returncode}: {done.stdout[-3000:]}")


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
