"""Measure the time that Redis takes to choose the next job among many tenants, and the fairness of the choice.

No worker is running. Jobs are queued and taken through the ledger, in the same way as a worker takes them. The time to
take a job is the script's running time in Redis, without the network round trip.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from cellama.bench.harness.report import Report
from cellama.bench.harness.service import serving

QUEUE = "cellama:queue:shares"
PRIORITY = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=100_000)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--takes", type=int, default=5000)


def run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, Any]] = []
    for num_tenants in (1, args.tenants):
        with serving({"source": "bundled://tiny"}, workers=0) as service:
            rows.append(_measure(service.redis, args.jobs, num_tenants, args.takes))
    ratios = {
        "time of a take in ms": rows[1]["take ms"],
        "time over that of one tenant": rows[1]["take ms"] / rows[0]["take ms"],
    }
    caveats = ["The producer and Redis share this machine's cores."]
    return Report(rows, ratios, {"time of a take in ms": "<= 0.3"}, caveats)


def _measure(redis: Any, num_jobs: int, num_tenants: int, num_takes: int) -> dict[str, Any]:
    """Take some jobs from a queue in which the first tenant has half of all jobs."""
    from cellama.tasks.contract.names import queue_key
    from cellama.tasks.state.ledger import Ledger

    ledger, key = Ledger(redis), queue_key(QUEUE, PRIORITY)
    tenants = [f"tenant{number % num_tenants if number % 2 else 0}" for number in range(num_jobs)]
    for start in range(0, num_jobs, 100):
        ledger.submit(
            [_submission(number, tenants[number], key) for number in range(start, min(num_jobs, start + 100))]
        )
    calls, microseconds = _script_time(redis)
    taken: Counter[str] = Counter()
    for _ in range(num_takes):
        ticket = json.loads(redis.rpop(key))["headers"]["id"]
        (fetched,) = ledger.take(key, ticket, 60)
        taken[tenants[int(fetched.taken.job_id)]] += 1
    num_calls, time_us = (
        after - before for after, before in zip(_script_time(redis), (calls, microseconds), strict=True)
    )
    return {
        "tenants": num_tenants,
        "jobs": num_jobs,
        "take ms": time_us / num_calls / 1e3,
        "most jobs of a tenant": max(taken.values()),
        "least": min(taken.values()),
    }


def _script_time(redis: Any) -> tuple[int, int]:
    """Return the number of scripts that Redis has run, and their total time in microseconds."""
    found = redis.info("commandstats")["cmdstat_evalsha"]
    return found["calls"], found["usec"]


def _submission(number: int, tenant: str, key: str) -> Any:
    from cellama.tasks.contract.names import SUBMITTED_AT_HEADER
    from cellama.tasks.state.ledger import Message, Submission, TaskCall

    job_id = str(number)
    headers = {"id": job_id, "task": "cellama.generate", SUBMITTED_AT_HEADER: 1.0}
    message = {"body": "W10=", "headers": headers, "properties": {"correlation_id": job_id, "delivery_tag": job_id}}
    call = TaskCall(
        task="cellama.generate", args=["shares", "Hi"], queue=QUEUE, priority=PRIORITY, given_fairness_key=tenant
    )
    return Submission(job_id, call, Message(key, json.dumps(message)))
