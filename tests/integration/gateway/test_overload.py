"""Beyond capacity, the gateway refuses what would wait too long, and serves the other requests by tier."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from cellama.api.client.client import Client
from cellama.api.machine.redis_server import RedisServer

from ...conftest import SLOTS, WorkerProcess, wait_until
from ...gateways import GatewayProcess

BODY = {"model": "tiny", "prompt": "A bird", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def test_tiers_are_served_in_order_and_all_flex_requests_complete_beyond_capacity(
    worker: WorkerProcess, redis_server: RedisServer, queue: Client, tmp_path: Path
) -> None:
    gateway = GatewayProcess(tmp_path, redis_server.url, CELLAMA_GATEWAY_MAX_WAIT_S="0.5").wait_ready()

    def send(tier: str, **params: Any) -> httpx.Response:
        return gateway.post("/v1/completions", json={**BODY, "service_tier": tier, **params})

    with ThreadPoolExecutor(4) as threads, worker.slowed():
        jobs = [queue.generate("tiny", f"Number {n}", max_tokens=1900, ignore_eos=True) for n in range(SLOTS)]
        try:
            wait_until(lambda: (queue.stats()["eta_s"]["tiny"] or 0) > 2, "busy slots")
            flex = [threads.submit(send, "flex", prompt=f"Bird {number}") for number in range(4)]
            wait_until(lambda: queue.stats()["classes"]["tiny"]["bulk"]["waiting"] == 4, "the flex requests")
            refused = [send("default"), send("flex", timeout=1)]
            assert [answer.status_code for answer in refused] == [429, 429]
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert "gateway_max_wait_s" in refused[0].text
            assert "timeout" in refused[1].text
            assert send("priority").status_code == 200
            assert not any(request.done() for request in flex)
            assert worker.engine_now()["requests_running"] == SLOTS
        finally:
            for job in jobs:
                job.cancel()
        assert [request.result().status_code for request in flex] == [200] * 4
    assert gateway.stop() == 0
