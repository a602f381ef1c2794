"""Run AIPerf, and read its exported files (https://github.com/ai-dynamo/aiperf)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cellama.bench.peers.aiperf import VERSION
from cellama.bench.peers.offline_tools import TOKENIZER, OfflineTool

from .figures import Definitions, Judgement, RunFigures, in_order
from .workloads import BLOCK_TOKENS, NEW_TOKENS, PROMPT_TOKENS, Workload

NAME = "aiperf"
PACKAGES = (f"aiperf=={VERSION}",)
DEFINITIONS = Definitions(weighs_gaps=False, waits_for_end=False)
SUMMARY, RECORDS = "profile_export_aiperf.json", "profile_export_raw.jsonl"


def measure(tool: OfflineTool, workload: Workload, url: str, model: str) -> Judgement:
    """Let AIPerf send a workload to a server, and return its judgement. Raises RuntimeError if AIPerf fails."""
    artifacts = tool.scratch / "artifacts"
    common = ["--model", model, "--url", url, "--endpoint-type", "completions", "--streaming", "--tokenizer", TOKENIZER]
    common += ["--extra-inputs", '{"temperature": 0, "ignore_eos": true}', "--use-server-token-count"]
    common += ["--connection-reuse-strategy", "never"]  # llama-server closes idle connections
    common += ["--output-artifact-dir", str(artifacts), "--export-level", "raw"]
    common += ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
    tool.run("aiperf", "profile", *common, *_load(tool, workload))
    records = [json.loads(line) for line in (artifacts / RECORDS).read_text().splitlines()]
    return judgement(json.loads((artifacts / SUMMARY).read_text()), records)


def _load(tool: OfflineTool, workload: Workload) -> list[str]:
    if not workload.rows:
        lengths = ["--isl", str(PROMPT_TOKENS), "--isl-stddev", "0", "--osl", str(NEW_TOKENS), "--osl-stddev", "0"]
        counts = ["--concurrency", str(workload.concurrency), "--request-count", str(workload.num_requests)]
        return [*lengths, *counts, "--num-dataset-entries", str(workload.num_requests)]
    trace = tool.scratch / "trace.jsonl"
    workload.write(trace)
    kind = ["--custom-dataset-type", "mooncake_trace", "--isl-block-size", str(BLOCK_TOKENS)]
    return ["--input-file", str(trace), *kind, "--fixed-schedule"]


def judgement(summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Judgement:
    """Return the judgement of AIPerf's summary and its records of single requests."""
    first = summary["time_to_first_token"]
    figures = RunFigures(
        requests=round(summary["request_count"]["avg"]),
        failed=round((summary.get("error_request_count") or {"avg": 0})["avg"]),
        request_rate=summary["request_throughput"]["avg"],
        token_rate=summary["output_token_throughput"]["avg"],
        first_mean_ms=first["avg"],
        first_p50_ms=first["p50"],
        first_p95_ms=first["p95"],
        gap_mean_ms=summary["inter_token_latency"]["avg"],
        latency_mean_ms=summary["request_latency"]["avg"],
    )
    sent = [(one["metadata"]["request_start_ns"] / 1e9, one["payload"]) for one in records]
    return Judgement(figures, in_order(sent))
