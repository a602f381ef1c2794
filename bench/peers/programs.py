"""llama.cpp's own programs as peers, where they are built (bench/README.md says how).

BENCH_LLAMA_BATCHED_BENCH and BENCH_LLAMA_SERVER name the programs `llama-batched-bench` and `llama-server`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellama.api.machine.redis_server import free_port

BATCHED_BENCH, LLAMA_SERVER = "BENCH_LLAMA_BATCHED_BENCH", "BENCH_LLAMA_SERVER"
START_S = 120.0
REQUEST_S = 1200.0
LOST_OUTPUTS = 5  # it prints from a thread, and now and then ends before that has printed


def program(variable: str) -> Path | None:
    """The peer that an environment variable names; None, and a word about it, if there is none."""
    named = os.environ.get(variable)
    if named and Path(named).is_file():
        return Path(named)
    print(f"{variable} names no program, so this peer is left out; bench/README.md says how to build it")
    return None


def _environment(path: Path) -> dict[str, str]:
    """Its shared libraries lie beside it."""
    libraries = os.pathsep.join(filter(None, [str(path.parent), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "LD_LIBRARY_PATH": libraries}


def batched_bench(path: Path, model: Path, num_sequences: int, num_prompt: int, num_new: int, *args: str) -> Any:
    """What `llama-batched-bench` measures for one number of sequences, as it says it."""
    command = [str(path), "-m", str(model), "-npp", str(num_prompt), "-ntg", str(num_new)]
    command += ["-npl", str(num_sequences), "--output-format", "jsonl", *args]
    for _ in range(LOST_OUTPUTS):
        done = subprocess.run(command, env=_environment(path), capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                return json.loads(line)
    raise RuntimeError(f"{path.name} printed no result in {LOST_OUTPUTS} runs; try: {' '.join(command)}")


@dataclass(frozen=True)
class Reply:
    """One request to llama-server, in seconds from its submission."""

    ttft_s: float
    total_s: float
    num_tokens: int
    num_computed: int  # prompt tokens that it did not have in its cache


@contextlib.contextmanager
def served(command: Sequence[str], environment: dict[str, str], port: int, path: str) -> Iterator[None]:
    """A server on a port of this machine, ended with the block; it is ready when it answers for the path with 200."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(process, port, path)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # it waits for connections that clients gave up
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int, path: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"a peer did not start (exit code {process.poll()}): {process.args!r}")


class LlamaServer:
    """A running llama-server."""

    def __init__(self, port: int) -> None:
        self.port = port

    @classmethod
    @contextlib.contextmanager
    def start(cls, path: Path, model: Path, *args: str) -> Iterator[LlamaServer]:
        """A server for one model, ended with the block."""
        port = free_port()
        command = [str(path), "-m", str(model), "--port", str(port), "--threads-http", "160", *args]
        with served(command, _environment(path), port, "/health"):
            yield cls(port)

    def complete(self, prompt: Sequence[int], num_new: int) -> Reply:
        """One greedy request over a connection of its own: the server closes kept ones under load."""
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        body = {
            "prompt": list(prompt),
            "n_predict": num_new,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": True,
        }
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response, first, last = connection.getresponse(), None, {}
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {response.read()[:200]!r}")
        for line in response:
            if line.startswith(b"data: "):
                first = first or time.monotonic()
                last = json.loads(line[6:])
        ended = time.monotonic()
        connection.close()
        computed = int(last.get("timings", {}).get("prompt_n", -1))
        return Reply((first or ended) - started, ended - started, int(last.get("tokens_predicted", 0)), computed)

    def complete_all(self, prompts: Sequence[Sequence[int]], num_new: int) -> tuple[float, list[Reply]]:
        """All at once, each from a thread; seconds until the last, and the replies in order."""
        replies: list[Reply | None] = [None] * len(prompts)

        def run(index: int) -> None:
            replies[index] = self.complete(prompts[index], num_new)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - started
        return seconds, [reply for reply in replies if reply is not None]
