"""Background responses that are read while gateway, workers and Redis are killed or restarted in turns.

Each reader asks again with `starting_after` when its stream breaks off. What it has in the end must have every number
once, and the text of an undisturbed run (near ties counted apart, reference_texts.py).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from openai import APIError, OpenAI

from cellama.api import Client
from cellama.api.machine.redis_server import die_with, free_port
from cellama.bench.harness.reference_texts import LOGPROBS, ReferenceText, reference_texts
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import PATIENCE_S, Service, wait_until

SOURCE, MODEL = "bundled://tiny", "bench"
COMMAND = "import sys; from cellama.api.cli import main; sys.argv[0] = 'cellama'; main()"
ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
AGAIN_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--responses", type=int, default=50)
    parser.add_argument("--new", type=int, default=200, help="tokens per response")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=16, help="of each worker")
    parser.add_argument("--rounds", type=int, default=2, help="each ends gateway, a worker, and Redis")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    model = {"id": MODEL, "source": SOURCE, "n_parallel": args.slots, "threads": 1, "default": True}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service:
        for _ in range(args.workers):
            service.start_worker()
        service.wait_ready()
        gateway = _Gateway(Path(folder))
        try:
            row = _run(service, gateway, args)
        finally:
            gateway.kill()
    ratios = {"responses with a gap, a repetition or another text": float(row["wrong"])}
    return Report([row], ratios, dict.fromkeys(ratios, "0"), ["All share the processors; times say little."])


class _Gateway:
    """A process that may be killed; its successor listens at the same address."""

    def __init__(self, folder: Path) -> None:
        self._port, self._log = free_port(), folder / "gateway.log"
        self.start()

    def start(self) -> None:
        argv = [sys.executable, "-c", COMMAND, "gateway", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, preexec_fn=die_with(os.getpid()))
        wait_until(self._answers, "the gateway")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self._port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self._port}/v1", api_key="none", max_retries=0)


class _Reader(threading.Thread):
    """Reads one response until it has ended."""

    def __init__(self, gateway: _Gateway, response_id: str) -> None:
        super().__init__(daemon=True)
        self._gateway, self._id = gateway, response_id
        self.events: list[Any] = []
        self.num_broken = 0  # streams that ended before the response did
        self.start()

    def run(self) -> None:
        with self._gateway.client() as client:
            while not self.events or self.events[-1].type not in ENDS:
                after: Any = {"starting_after": self.events[-1].sequence_number} if self.events else {}
                num_read = len(self.events)
                try:
                    for event in client.responses.retrieve(self._id, stream=True, **after):
                        self.events.append(event)
                except (APIError, httpx.TransportError):
                    time.sleep(AGAIN_S)
                self.num_broken += len(self.events) > num_read and self.events[-1].type not in ENDS

    def is_wrong(self, expected: ReferenceText) -> bool:
        numbers = [event.sequence_number for event in self.events]
        return numbers != list(range(len(numbers))) or expected.compare(self.text) == "other"

    @property
    def text(self) -> str:
        return "".join(event.delta for event in self.events if event.type == "response.output_text.delta")


def _prompt(number: int) -> str:
    return f"Tell a story about {number} foxes."


def _undisturbed(args: argparse.Namespace) -> list[ReferenceText]:
    params: Any = {"temperature": 0, "max_tokens": args.new, "ignore_eos": True, "logprobs": LOGPROBS}
    asked: list[Any] = [[{"role": "user", "content": _prompt(number)}] for number in range(args.responses)]
    with Client() as client:
        jobs = client.chat_many(MODEL, asked, wait=True, **params)
        return reference_texts([job.result(PATIENCE_S) for job in jobs], SOURCE)


def _run(service: Service, gateway: _Gateway, args: argparse.Namespace) -> dict[str, Any]:
    expected, started = _undisturbed(args), time.monotonic()
    params: Any = {"temperature": 0, "max_output_tokens": args.new, "extra_body": {"ignore_eos": True}}
    with gateway.client() as client:
        asked = [
            client.responses.create(model=MODEL, input=_prompt(number), background=True, **params)
            for number in range(args.responses)
        ]
    readers = [_Reader(gateway, response.id) for response in asked]
    _end_things(service, gateway, readers, args)
    for reader in readers:
        reader.join(PATIENCE_S)
    pairs = list(zip(readers, expected, strict=True))
    return {
        "responses": len(readers),
        "wrong": sum(reader.is_alive() or reader.is_wrong(text) for reader, text in pairs),
        "tied": sum(text.compare(reader.text) == "tied" for reader, text in pairs),
        "troubles": 3 * args.rounds,
        "streams broken off": sum(reader.num_broken for reader in readers),
        "seconds": time.monotonic() - started,
    }


def _wait_for_events(readers: list[_Reader], least: int) -> None:
    wait_until(lambda: sum(len(reader.events) for reader in readers) >= least, f"{least} events")


def _end_things(service: Service, gateway: _Gateway, readers: list[_Reader], args: argparse.Namespace) -> None:
    """One after another, each when readers have come a step further, so that all of it falls into the midst."""
    chosen, num_troubles = random.Random(args.seed), 3 * args.rounds
    for number in range(1, num_troubles + 1):
        least = args.responses * args.new * number // (num_troubles + 1)
        _wait_for_events(readers, least)
        if number % 3 == 1:
            gateway.kill()
            gateway.start()
        elif number % 3 == 2:
            name = chosen.choice(sorted(service.processes))
            service.kill(name)
            service.start_worker(name)
        else:
            service.restart_redis()
