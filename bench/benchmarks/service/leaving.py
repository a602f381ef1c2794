"""Clients of a gateway that all go away in the midst of their answers: when their slots are free, and what is left.

Half of them stream, half wait for the whole; as many of their jobs as there are slots run, the others wait. All
connections are cut at the same moment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redis import Redis

from cellama.api.machine.redis_server import free_port
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, wait_until
from cellama.bench.peers.gateway_process import gateway
from cellama.tasks.contract.keys import RUNNING_KEY
from cellama.tasks.state.job_list import open_jobs

MODEL = "bundled tiny"
SOURCE = "bundled://tiny"
NEW = 1900  # tokens: no answer comes to its end
STEPS = "most steps until all slots were free"
TRACES = "traces of jobs in Redis that never expire"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pace", type=float, default=1.0, help="seconds per step")


def run(args: argparse.Namespace) -> Report:
    model = {"id": "bench", "source": SOURCE, "n_parallel": args.slots, "threads": 1, "default": True}
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), [model]) as service, ExitStack() as peers:
        service.start_worker()
        service.wait_ready()
        port = free_port()
        peers.enter_context(gateway(port, gateway_max_wait_s="0"))  # whoever comes waits
        rows = []
        for _ in range(args.rounds):
            with service.slowed(args.pace):
                rows.append(_leave(service, port, args))
    worst = {STEPS: max(row["steps"] for row in rows), TRACES: sum(row["traces"] for row in rows)}
    caveats = [
        "steps: tokens that were sampled from the moment on at which the clients left, over slots; the step that is "
        "under way then is one",
        "traces: keys, fields and members that name one of the jobs, in whatever has no TTL, a minute later at most",
    ]
    return Report(rows, worst, {STEPS: "<= 2", TRACES: "0"}, caveats)


def _leave(service: Service, port: int, args: argparse.Namespace) -> dict[str, Any]:
    redis = service.redis
    ids, sampled, left = asyncio.run(_come_and_leave(service, port, args))
    wait_until(lambda: not open_jobs(redis, None, 1), "the end of all jobs")
    free_ms = (time.monotonic() - left) * 1e3
    steps = (service.num_sampled() - sampled) / args.slots
    row = {"clients": args.clients, "slots": args.slots, "step ms": args.pace * 1e3, "free after ms": free_ms}
    until = time.monotonic() + 60
    while (num_traces := len(list(traces(redis, ids)))) and time.monotonic() < until:
        time.sleep(0.2)
    return {**row, "steps": steps, "traces": num_traces, "forgotten after ms": (time.monotonic() - left) * 1e3}


async def _come_and_leave(service: Service, port: int, args: argparse.Namespace) -> tuple[list[str], int, float]:
    """The ids of their jobs; the tokens that were sampled until they left, and when that was."""
    redis = service.redis
    asking = [asyncio.create_task(_ask(port, number)) for number in range(args.clients)]

    def all_there() -> bool:
        for task in asking:
            if task.done():
                task.result()
        return bool(redis.zcard(RUNNING_KEY) == args.slots and len(open_jobs(redis, None, 10_000)) == args.clients)

    await asyncio.to_thread(wait_until, all_there, "all jobs, and all slots busy")
    ids = [job.job_id for job in open_jobs(redis, None, 10_000)]
    sampled, left = service.num_sampled(), time.monotonic()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    return ids, sampled, left


async def _ask(port: int, number: int) -> None:
    """Reads the answer until it is cancelled; then the connection is cut."""
    body = {"model": "bench", "prompt": f"Number {number}", "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": number % 2 == 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        told = b""
        while piece := await reader.read(65536):
            told = told or piece
    finally:
        writer.transport.abort()
    raise RuntimeError(f"an answer ended early: {told[:300]!r}")


def traces(redis: Redis, job_ids: Collection[str]) -> Iterator[str]:
    """The keys without a TTL that name one of these jobs, or have a field or member that does."""
    names = [job_id.encode() for job_id in job_ids]
    for key in redis.scan_iter(count=1000):
        if redis.ttl(key) == -1 and any(name in told for told in (key, *_contents(redis, key)) for name in names):
            yield key.decode()


def _contents(redis: Any, key: bytes) -> list[bytes]:
    """Fields, members and entries, of whatever type the key is."""
    reads: dict[bytes, Any] = {
        b"hash": lambda: [part for pair in redis.hgetall(key).items() for part in pair],
        b"zset": lambda: redis.zrange(key, 0, -1),
        b"set": lambda: redis.smembers(key),
        b"list": lambda: redis.lrange(key, 0, -1),
        b"stream": lambda: [part for _, told in redis.xrange(key) for pair in told.items() for part in pair],
        b"string": lambda: [redis.get(key) or b""],
        b"none": list,
    }
    return list(reads[redis.type(key)]())
