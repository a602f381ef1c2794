"""Failovers of a Redis with sentinels while jobs run, by kills and planned ones: what is lost, torn or done twice.

As in `chaos`: real workers with the bundled model, half of the jobs stream, each text is compared with that of an
undisturbed run. Redis replicates asynchronously, so what the master took last may be gone; that is told as it is.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path

from cellama.api.machine.redis_server import RedisServer
from cellama.bench.harness.report import Report
from cellama.bench.harness.service import Service, Stored
from cellama.tasks.connection.connections import connect

from .chaos import MODEL as MODEL
from .scenario import SLOTS, Scenario
from .sentinels import SentinelSetup
from .troubles import Troubles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--new", type=int, default=400, help="tokens per job")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--failovers", type=int, default=6, help="every second one is a kill, the others are planned")
    parser.add_argument("--period", type=float, default=5.0, help="seconds between two of them")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        model = {"id": "tiny", "source": "bundled://tiny", "n_parallel": SLOTS, "threads": 1, "default": True}
        with _SentinelService(Path(folder), [model]) as service:
            for _ in range(args.workers):
                service.start_worker()
            service.wait_ready()
            scenario = _Failovers(service, args)
            rows = [scenario.run("sentinel", scenario.undisturbed())]
    return Report(rows, caveats=["The workers share the cores with Redis, sentinels and the producer."])


class _SentinelService(Service):
    """Workers on two servers and three sentinels."""

    def start_redis(self) -> None:
        self.sentinels = self._starter.submit(SentinelSetup(self.folder / "redis", num_sentinels=3).__enter__).result()
        self.redis_server = self.sentinels

    def bring_back(self, server: RedisServer) -> None:
        self._starter.submit(self.sentinels.bring_back, server).result()


class _FailoverTroubles(Troubles):
    _service: _SentinelService

    def sentinel(self, done: threading.Event) -> None:
        sentinels = self._service.sentinels
        while self.count < self._args.failovers and not done.wait(self._args.period):
            before = set(self._stored.states)
            if self.count % 2:
                sentinels.hand_over()
            else:
                self._service.bring_back(sentinels.kill_master())
            sentinels.wait_until_replicated()
            with connect(sentinels.master().url) as master:  # pooled connections may still lead to the other one
                self._stored.forget_lost(before, master)
            self.count += 1


class _Failovers(Scenario):
    def _troubles(self, stored: Stored) -> Troubles:
        return _FailoverTroubles(self._service, self._args, stored)
