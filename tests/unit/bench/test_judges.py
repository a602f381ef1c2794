"""The judges' workloads have the shape of the traces, and their files are read correctly."""

from __future__ import annotations

import asyncio
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from cellama.bench.judges import aiperf, guidellm, ours
from cellama.bench.judges.figures import Definitions, RunFigures, SentRequest
from cellama.bench.judges.workloads import BLOCK_TOKENS, CONTEXT_TOKENS, azure, mooncake, prompts

FIGURES = RunFigures(
    requests=2,
    failed=1,
    request_rate=1.5,
    token_rate=48.0,
    first_mean_ms=20.0,
    first_p50_ms=19.0,
    first_p95_ms=30.0,
    gap_mean_ms=5.0,
    latency_mean_ms=180.0,
)


def test_mooncake_has_the_published_shape_in_shorter_blocks() -> None:
    rows = mooncake(4000, per_s=2.0, seed=1).rows
    assert len(rows) == 4000
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)
    assert rows[0].timestamp == 0
    assert all(len(row.hash_ids) == -(-row.input_length // BLOCK_TOKENS) for row in rows)
    assert all(row.input_length + row.output_length < CONTEXT_TOKENS for row in rows)
    assert statistics.median(row.output_length for row in rows) == pytest.approx(343 / 16, rel=0.15)
    seen: set[int] = set()
    num_shared = 0
    for row in rows:
        num_shared += sum(block in seen for block in row.hash_ids)
        seen.update(row.hash_ids)
    assert num_shared / sum(len(row.hash_ids) for row in rows) == pytest.approx(0.366, abs=0.08)


def test_azure_has_the_published_medians_divided_by_eight(tmp_path: Path) -> None:
    workload = azure(2000, per_s=2.0, seed=1)
    assert statistics.median(row.input_length for row in workload.rows) == pytest.approx(1020 / 8, rel=0.1)
    assert statistics.median(row.output_length for row in workload.rows) == pytest.approx(129 / 8, rel=0.15)
    assert workload.rows[-1].timestamp == pytest.approx(1e6, rel=0.1)  # milliseconds
    workload.write(tmp_path / "trace.jsonl")
    first = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[0])
    assert set(first) == {"timestamp", "input_length", "output_length"}


def test_prompts_share_the_tokens_of_shared_blocks() -> None:
    workload = mooncake(60, per_s=2.0, seed=2)
    found = list(prompts(workload))
    assert [len(prompt) for prompt in found] == [row.input_length for row in workload.rows]
    full = [prompt for prompt, row in zip(found, workload.rows, strict=True) if row.hash_ids[0] == 0]
    assert len(full) > 10
    assert len({tuple(prompt[:BLOCK_TOKENS]) for prompt in full}) == 1
    assert len({tuple(prompt) for prompt in prompts(azure(20, per_s=2.0, seed=2))}) == 20


def test_guidellm_reads_figures_and_requests_of_a_report() -> None:
    def status(mean: float, **others: Any) -> dict[str, Any]:
        return {"successful": {"mean": mean, **others}, "errored": {"mean": 0.0}}

    def request(start: float, prompt: str) -> dict[str, Any]:
        return {"info": {"timings": {"request_start": start}}, "request_args": json.dumps({"body": {"prompt": prompt}})}

    metrics = {
        "requests_per_second": status(1.5),
        "output_tokens_per_second": status(48.0),
        "time_to_first_token_ms": status(20.0, median=19.0, percentiles={"p95": 30.0}),
        "inter_token_latency_ms": status(5.0),
        "request_latency": status(0.18),
    }
    requests = {"successful": [request(107.5, "second"), request(105.0, "first")], "errored": [{}], "incomplete": []}
    found = guidellm.judgement({"benchmarks": [{"metrics": metrics, "requests": requests}]})
    assert found.figures == FIGURES
    assert found.sent == [SentRequest(0.0, {"prompt": "first"}), SentRequest(2.5, {"prompt": "second"})]


def test_aiperf_reads_figures_and_requests_of_its_exports() -> None:
    summary = {
        "request_count": {"avg": 2.0},
        "error_request_count": {"avg": 1.0},
        "request_throughput": {"avg": 1.5},
        "output_token_throughput": {"avg": 48.0},
        "time_to_first_token": {"avg": 20.0, "p50": 19.0, "p95": 30.0},
        "inter_token_latency": {"avg": 5.0},
        "request_latency": {"avg": 180.0},
    }
    records = [
        {"metadata": {"request_start_ns": 7_500_000_000}, "payload": {"prompt": "second"}},
        {"metadata": {"request_start_ns": 5_000_000_000}, "payload": {"prompt": "first"}},
    ]
    found = aiperf.judgement(summary, records)
    assert found.figures == FIGURES
    assert found.sent == [SentRequest(0.0, {"prompt": "first"}), SentRequest(2.5, {"prompt": "second"})]


def test_difference_is_relative_to_the_other_figures() -> None:
    other = RunFigures(**{name: getattr(FIGURES, name) * 2 for name in RunFigures.__slots__})
    assert set(FIGURES.difference_to(other).values()) == {-0.5}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request with as many tokens as it asks for, 20 ms apart."""
    await reader.readuntil(b"\r\n\r\n")
    num_new = json.loads(await reader.readuntil(b"}"))["max_tokens"]  # the only object
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    for number in range(num_new):
        await asyncio.sleep(0.02)
        is_last = number == num_new - 1
        event: dict[str, Any] = {"choices": [{"text": "a", "finish_reason": "length" if is_last else None}]}
        writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
    usage = {"choices": [], "usage": {"completion_tokens": num_new}}
    writer.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
    writer.close()


@pytest.mark.parametrize("concurrency", [0, 2])
def test_our_client_counts_tokens_and_gaps(concurrency: int) -> None:
    async def run() -> RunFigures:
        async with await asyncio.start_server(_serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            sent = [SentRequest(0.05 * number, {"max_tokens": 3 + number}) for number in range(3)]
            return await ours.measure(port, sent, concurrency, Definitions(weighs_gaps=True, waits_for_end=True))

    found = asyncio.run(run())
    assert (found.requests, found.failed) == (3, 0)
    assert found.token_rate == pytest.approx(found.request_rate * 4)
    assert found.first_mean_ms >= 20
    assert found.gap_mean_ms >= 20
    assert found.latency_mean_ms >= found.first_mean_ms + 60
