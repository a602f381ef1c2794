"""Run llama.cpp's own programs as peers, if they were built as described in bench/README.md.

BENCH_LLAMA_BATCHED_BENCH and BENCH_LLAMA_SERVER contain the paths of the programs `llama-batched-bench` and
`llama-server`.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.engine.memory.open_sizes import STREAM_PADDING

BATCHED_BENCH, LLAMA_SERVER = "BENCH_LLAMA_BATCHED_BENCH", "BENCH_LLAMA_SERVER"
START_S = 120.0
REQUEST_S = 1200.0
LOST_OUTPUTS = 5  # it prints from a thread, and sometimes exits before this thread has printed


def program(variable: str) -> Path | None:
    """Return the program that an environment variable names, or print a note and return None if the file is missing."""
    named = os.environ.get(variable)
    if named and Path(named).is_file():
        return Path(named)
    print(f"{variable} does not name a program, so this peer is omitted; bench/README.md explains how to build it")
    return None


@contextlib.contextmanager
def llama_server(model: Path, slots: int, context: int, threads: int, *args: str) -> Iterator[LlamaServer | None]:
    """Run a warm llama-server with this context per slot and default settings, or None if llama-server is missing."""
    if not (peer := program(LLAMA_SERVER)):
        yield None
        return
    size = -(-context // STREAM_PADDING) * STREAM_PADDING * slots
    with LlamaServer.start(peer, model, "-np", str(slots), "-c", str(size), "-t", str(threads), *args) as server:
        server.complete(range(300, 316), 4)
        yield server


def server_environment(path: Path) -> dict[str, str]:
    """Return environment variables with which a program finds the shared libraries in its own directory."""
    libraries = os.pathsep.join(filter(None, [str(path.parent), os.environ.get("LD_LIBRARY_PATH")]))
    return {**os.environ, "LD_LIBRARY_PATH": libraries}


def batched_bench(path: Path, model: Path, num_sequences: int, num_prompt: int, num_new: int, *args: str) -> Any:
    """Return the result that `llama-batched-bench` prints for one number of sequences."""
    command = [str(path), "-m", str(model), "-npp", str(num_prompt), "-ntg", str(num_new)]
    command += ["-npl", str(num_sequences), "--output-format", "jsonl", *args]
    for _ in range(LOST_OUTPUTS):
        done = subprocess.run(command, env=server_environment(path), capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                return json.loads(line)
    raise RuntimeError(f"{path.name} printed no result in {LOST_OUTPUTS} runs; try: {' '.join(command)}")


@dataclass(frozen=True)
class Reply:
    """The reply of llama-server to one request. Times are in seconds after the request was sent."""

    pieces_s: Sequence[float]  # when each piece of text came
    total_s: float
    tokens: Sequence[int]  # except those of an incomplete character
    num_tokens: int
    num_computed: int  # prompt tokens that it did not have in its cache

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0] if self.pieces_s else self.total_s

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in itertools.pairwise(self.pieces_s)]

    @property
    def generation_rate(self) -> float:
        """Return the tokens per second after the first token."""
        return (self.num_tokens - 1) / (self.total_s - self.ttft_s)


@contextlib.contextmanager
def served(
    command: Sequence[str], environment: dict[str, str], port: int, path: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server on a local port until the block ends.

    The server is ready when it answers the path with status 200.
    """
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(process, port, path)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # it waits for connections that clients have abandoned
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
    raise RuntimeError(f"a peer process did not start (exit code {process.poll()}): {process.args!r}")


class LlamaServer:
    """A running llama-server."""

    def __init__(self, port: int) -> None:
        self.port = port

    @classmethod
    @contextlib.contextmanager
    def start(cls, path: Path, model: Path, *args: str) -> Iterator[LlamaServer]:
        """Run a server for one model until the block ends."""
        port = free_port()
        command = [str(path), "-m", str(model), "--port", str(port), "--threads-http", "160", *args]
        with served(command, server_environment(path), port, "/health"):
            yield cls(port)

    def complete(self, prompt: Sequence[int] | str, num_new: int, *, cache_prompt: bool = True) -> Reply:
        """Run one greedy request."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        body = {"prompt": given, "n_predict": num_new, "cache_prompt": cache_prompt, "stream": True}
        asked = time.monotonic()
        with self._post("/completion", {**body, "temperature": 0, "ignore_eos": True}) as response:
            lines = [(time.monotonic() - asked, line[6:]) for line in response if line.startswith(b"data: ")]
        total_s = time.monotonic() - asked
        events = [(at_s, json.loads(line)) for at_s, line in lines]  # read when no other request can wait for it
        last = events[-1][1] if events else {}
        return Reply(
            [at_s for at_s, event in events if event.get("tokens")],
            total_s,
            [token for _, event in events for token in event.get("tokens", ())],
            int(last.get("tokens_predicted", 0)),
            int(last.get("timings", {}).get("prompt_n", -1)),
        )

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        with self._post("/tokenize", {"content": text}) as response:
            return list(json.load(response)["tokens"])

    def complete_all(self, prompts: Sequence[Sequence[int]], num_new: int | Sequence[int]) -> tuple[float, list[Reply]]:
        """Run all requests concurrently in threads, and return the elapsed seconds and the replies in order."""
        lengths = [num_new] * len(prompts) if isinstance(num_new, int) else num_new
        started = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as threads:
            replies = list(threads.map(self.complete, prompts, lengths))
        return time.monotonic() - started, replies

    def rate_of_all(self, prompts: Sequence[Sequence[int]], num_new: int, **sampling: float) -> float:
        """Run all requests concurrently without streaming, and return the generated tokens per second."""

        def complete(prompt: Sequence[int]) -> int:
            body = {"prompt": list(prompt), "n_predict": num_new, "cache_prompt": False, "ignore_eos": True}
            with self._post("/completion", {**body, **sampling}) as response:
                return int(json.load(response)["tokens_predicted"])

        started = time.monotonic()
        with ThreadPoolExecutor(len(prompts)) as threads:
            num_tokens = sum(threads.map(complete, prompts))
        return num_tokens / (time.monotonic() - started)

    @contextlib.contextmanager
    def _post(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Send a request over a new connection, because the server closes idle connections under load."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(
                    f"llama-server replied with HTTP status {response.status}: {response.read()[:200]!r}"
                )
            yield response
