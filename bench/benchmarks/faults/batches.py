"""OpenAI's batch script, unmodified, while the gateway that drives its batch is killed (kill -9): every line once?

The script (peers/openai_batch.py) asks a gateway that drives no batches (`gateway_batches_at_once` 0), as it would ask
a load balancer in front of several. Another one drives; when a third of the lines has ended it is killed, and one more
is started. The texts are compared with those of an undisturbed run; texts that go another way at a near tie are counted
apart (reference_texts.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cellama.api.machine.redis_server import free_port
from cellama.bench import peers
from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, of_chat_body
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import PATIENCE_S, Service, wait_until
from cellama.bench.peers.gateway_process import gateway
from cellama.tasks.contract.keys import batch_key, http_record_key

MODEL = "bundled tiny"
SOURCE = "bundled://tiny"
SCRIPT = Path(peers.__file__).with_name("openai_batch.py")
ANIMALS = ("fox", "bear", "cat", "frog", "mouse", "dragon")
WRONG = "lines lost, doubled or other"
TWICE = "% of tokens generated twice"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--new", type=int, default=16, help="tokens per line")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--lease", type=int, help="of the gateways, seconds; default: that of the settings")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds per step at least until the gateway is killed")
    parser.add_argument("--places", nargs="+", choices=("directory", "url"), default=["directory", "url"])


def run(args: argparse.Namespace) -> Report:
    model = {"id": "bench", "source": SOURCE, "n_parallel": args.slots, "threads": 1, "default": True}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        service.start_worker()
        service.wait_ready()
        scripts = _Scripts(service, Path(folder), args)
        rows = [scripts.run("undisturbed", "directory", is_killed=False)]
        rows += [scripts.run("gateway killed", place, is_killed=True) for place in args.places]
    ratios = {WRONG: sum(row["wrong"] for row in rows), TWICE: max(row["twice %"] for row in rows)}
    caveats = [
        "behind a URL another machine goes on from what was saved, after 1 s, then a tenth of the time so far, then "
        "30 s: what came since, or was in flight, is generated twice",
        "a gateway takes over when the lease of the dead one has ended",
    ]
    wrong = [f"{ratios[WRONG]} {WRONG}"] if ratios[WRONG] else []
    return Report(rows, ratios, {WRONG: "0"}, caveats, wrong)


class _Scripts:
    """One service, one file of lines."""

    def __init__(self, service: Service, folder: Path, args: argparse.Namespace) -> None:
        self._service, self._folder, self._args = service, folder, args
        self._undisturbed: dict[str, ReferenceText] = {}
        self._source = folder / "in.jsonl"

    def run(self, name: str, place: str, *, is_killed: bool) -> dict[str, Any]:
        """The script from its start to its end, with gateways of its own."""
        self._write_lines(**({} if self._undisturbed else {"logprobs": True, "top_logprobs": LOGPROBS}))
        folder = self._folder / f"{name} {place}"
        folder.mkdir()
        output, errors = folder / "out.jsonl", folder / "errors.jsonl"
        lease = {"gateway_lease_s": str(self._args.lease)} if self._args.lease else {}
        with ExitStack() as running:
            files = f"file://{folder}/files" if place == "url" else f"{folder}/files"
            drives = {"gateway_files_dir": files, "gateway_work_dir": f"{folder}/one", **lease}
            killed = running.enter_context(gateway(free_port(), **drives))
            port = free_port()
            serves = {"gateway_files_dir": files, "gateway_work_dir": f"{folder}/none", "gateway_batches_at_once": "0"}
            running.enter_context(gateway(port, **serves))
            begun, sampled = time.monotonic(), self._service.num_sampled()
            script = self._start(port, output, errors)
            batch_id = _line(script)
            if is_killed:
                with self._service.slowed(self._args.pace):
                    self._wait_for_third(batch_id)
                    killed.kill()
                    killed.wait()
                    self._check_status(batch_id)
                running.enter_context(gateway(free_port(), **{**drives, "gateway_work_dir": f"{folder}/two"}))
            status = _line(script)
            script.wait(PATIENCE_S)
            seconds = time.monotonic() - begun
        lines = [json.loads(text) for text in output.read_text(encoding="utf-8").splitlines()]
        total = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)
        twice = 100 * (self._service.num_sampled() - sampled - total) / max(1, total)
        row = {"run": name, "place": place, "status": status, "seconds": seconds, "lines": len(lines)}
        return {**row, "errors": errors.read_bytes().count(b"\n"), **self._compare(lines), "twice %": twice}

    def _write_lines(self, **params: Any) -> None:
        with self._source.open("w", encoding="utf-8") as lines:
            for i in range(self._args.lines):
                question = f"Tell me a story of a {ANIMALS[i % 6]} and {i} others."
                asked = {"model": "bench", "messages": [{"role": "user", "content": question}], "temperature": 0}
                body = {**asked, "max_tokens": self._args.new, "ignore_eos": True, **params}
                line = {"custom_id": f"line-{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
                lines.write(json.dumps(line) + "\n")

    def _start(self, port: int, output: Path, errors: Path) -> subprocess.Popen[str]:
        argv = [sys.executable, str(SCRIPT), str(self._source), str(output), str(errors)]
        own = {"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1", "OPENAI_API_KEY": "none"}
        return subprocess.Popen(argv, env={**os.environ, **own}, stdout=subprocess.PIPE, text=True)

    def _wait_for_third(self, batch_id: str) -> None:
        def has_come_far() -> bool:
            found: Any = self._service.redis.hget(batch_key(batch_id), "finished")
            return bool(int(found or 0) > self._args.lines // 3)

        wait_until(has_come_far, "a third of the lines")

    def _check_status(self, batch_id: str) -> None:
        told: Any = self._service.redis.hget(http_record_key("batch", batch_id), "status")
        if json.loads(told) != "in_progress":
            raise RuntimeError(f"the batch was {told.decode()} when its gateway was killed: make it slower with --pace")

    def _compare(self, lines: list[dict[str, Any]]) -> dict[str, int]:
        """Lines that are missing, there twice, or have another text than without trouble; apart from these, texts that
        go another way at a near tie."""
        bodies = {line["custom_id"]: line["response"]["body"] for line in lines}
        if not self._undisturbed:
            self._undisturbed = {name: of_chat_body(body) for name, body in bodies.items()}
        counts = Counter(line["custom_id"] for line in lines)
        names = {f"line-{i}" for i in range(self._args.lines)}
        compared = {
            name: text.compare(bodies[name]["choices"][0]["message"]["content"])
            for name, text in self._undisturbed.items()
            if name in bodies
        }
        return {
            "wrong": sum(counts[name] != 1 or compared.get(name) == "other" for name in names | bodies.keys()),
            "tied": sum(kind == "tied" for kind in compared.values()),
        }


def _line(script: subprocess.Popen[str]) -> str:
    """What it says next. Raises RuntimeError if it has ended."""
    assert script.stdout is not None
    if not (told := script.stdout.readline().strip()):
        raise RuntimeError(f"the script ended with {script.wait()}")
    return told
