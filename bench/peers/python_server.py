"""llama-cpp-python's own server as a peer: FastAPI around one `llama_cpp.Llama`, which runs one request at a time.

BENCH_LLAMA_CPP_PYTHON names a Python with llama-cpp-python[server]. It takes texts, no token ids: a line's tokens
become letters, each of which is one token of the vocabulary that synthetic.py writes, so lines share what they did.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.workloads import Line, num_common, read_lines

from .offline_peers import Outcome, timed, write_result
from .programs import REQUEST_S, served

PYTHON = "BENCH_LLAMA_CPP_PYTHON"
END_TOKEN = "0"  # of synthetic.py's vocabulary; no line shall end early
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def run_lines(python: Path, model: Path, source: Path, target: Path, context: int, threads: int) -> Outcome:
    """All lines, one after the other, as the server would run them in any case."""
    port = free_port()
    command = [str(python), "-m", "llama_cpp.server", "--model", str(model), "--port", str(port), "--n_ctx"]
    command += [str(context), "--n_threads", str(threads), "--n_threads_batch", str(threads), "--verbose", "False"]
    apart = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with served(command, apart, port, "/v1/models"):
        _ask(port, Line("warm-up", tuple(range(300, 316)), 4))

        def run(out: IO[str]) -> None:
            before: Sequence[int] = ()
            for line in read_lines(source):
                choice, usage = _ask(port, line)
                computed = len(line.prompt) - num_common(before, line.prompt)
                write_result(out, line.custom_id, choice["text"], usage["completion_tokens"], computed)
                before = line.prompt

        return timed(source, target, run)


def _ask(port: int, line: Line) -> tuple[dict[str, Any], dict[str, int]]:
    """The answer to a line, and its token counts. Raises RuntimeError if letters are no tokens of this model."""
    text = "".join(LETTERS[token % len(LETTERS)] for token in line.prompt)
    body = {"prompt": text, "max_tokens": line.num_new, "temperature": 0, "logit_bias": {END_TOKEN: -100}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_S)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"llama-cpp-python's server answered {response.status}: {answer[:200]!r}")
    found = json.loads(answer)
    if found["usage"]["prompt_tokens"] != len(text):
        raise RuntimeError(f"{len(text)} letters are {found['usage']['prompt_tokens']} tokens of this model")
    return found["choices"][0], found["usage"]
