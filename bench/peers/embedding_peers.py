"""Start other embedding programs: fastembed and sentence-transformers in separate environments, and llama-server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import embedding_libraries
from .programs import REQUEST_S, LlamaServer

INSTALL_S = 1800.0  # for an installation; PyTorch is large
PACKAGES = {"fastembed": "fastembed==0.9.1", "sentence-transformers": "sentence-transformers[onnx]==5.7.0"}
LIBRARIES = {  # name in the table: environment, kind
    "fastembed": ("fastembed", "fastembed"),
    "sentence-transformers, ONNX": ("sentence-transformers", "onnx"),
    "sentence-transformers, PyTorch": ("sentence-transformers", "torch"),
}
PER_REQUEST = 32  # texts per HTTP request to llama-server
CONNECTIONS = 4
Vectors = NDArray[np.float32]


def python_of(environments: Path, name: str) -> Path:
    """Return the Python of a library's environment. A missing environment is created first."""
    python = environments / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environments / name)], check=True, timeout=INSTALL_S)
        argv = [str(python), "-m", "pip", "install", "--quiet", PACKAGES[name]]
        subprocess.run(argv, check=True, timeout=INSTALL_S)
    return python


def export_onnx(environments: Path, model: Path) -> Path:
    """Return a directory with the model as ONNX in float32. sentence-transformers writes it once."""
    target = environments / "minilm-onnx"
    if not (target / "tokenizer_config.json").exists():
        python = python_of(environments, "sentence-transformers")
        argv = [str(python), embedding_libraries.__file__, "export", str(model), "0", str(target)]
        subprocess.run(argv, check=True, timeout=INSTALL_S, env=_environment(), stderr=subprocess.DEVNULL)
    return target


class Library:
    """A library in a process of its own, which keeps the model loaded."""

    def __init__(self, process: subprocess.Popen[str], scratch: Path) -> None:
        self._process, self._scratch = process, scratch
        self.batch_size = 0

    @classmethod
    @contextlib.contextmanager
    def start(cls, python: Path, kind: str, directory: Path, threads: int, scratch: Path) -> Iterator[Library]:
        """Run a library until the block ends."""
        argv = [str(python), embedding_libraries.__file__, kind, str(directory), str(threads)]
        with subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        ) as process:
            library = cls(process, scratch)
            library._answer()
            try:
                yield library
            finally:
                process.terminate()

    def embed(self, texts: Sequence[str], *, choose: bool = False) -> tuple[float, Vectors]:
        """Return the seconds and the vectors. With `choose`, the fastest batch size is determined first."""
        assert self._process.stdin
        (self._scratch / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
        vectors = self._scratch / "vectors.npy"
        asked = {"texts": str(self._scratch / "texts.json"), "vectors": str(vectors), "choose": choose}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.batch_size = answer["batch_size"]
        return answer["seconds"], np.load(vectors)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError(f"an embedding library exited with code {self._process.wait()}: {self._process.args!r}")


def _environment() -> dict[str, str]:
    """Return environment variables without this Python's settings, and without limits for NumPy's kernels."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "OPENBLAS", "CELLAMA_"))}


def embed_with_server(server: LlamaServer, texts: Sequence[str]) -> tuple[float, Vectors]:
    """Return the seconds and the vectors of texts that are sent in requests of PER_REQUEST texts."""
    pages = [texts[start : start + PER_REQUEST] for start in range(0, len(texts), PER_REQUEST)]

    def embed(page: Sequence[str]) -> list[list[float]]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_S)
        with contextlib.closing(connection):
            connection.request(
                "POST", "/v1/embeddings", json.dumps({"input": page}), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"llama-server replied with {response.status}: {response.read()[:200]!r}")
            found = json.load(response)["data"]
        return [entry["embedding"] for entry in sorted(found, key=lambda entry: entry["index"])]

    started = time.perf_counter()
    with ThreadPoolExecutor(CONNECTIONS) as threads:
        vectors = [vector for page in threads.map(embed, pages) for vector in page]
    return time.perf_counter() - started, np.array(vectors, dtype=np.float32)
