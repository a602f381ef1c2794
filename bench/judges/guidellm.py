"""Run GuideLLM, and read its report (https://github.com/vllm-project/guidellm)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cellama.bench.peers.offline_tools import TOKENIZER, OfflineTool

from .figures import Definitions, Judgement, RunFigures, in_order
from .workloads import BLOCK_TOKENS, NEW_TOKENS, PROMPT_TOKENS, Workload

NAME = "guidellm"
PACKAGES = ("guidellm==0.8.1", "torch==2.13.0")  # guidellm needs PyTorch for its data loader
DEFINITIONS = Definitions(weighs_gaps=True, waits_for_end=True)
REPORT = "guidellm.json"


def measure(tool: OfflineTool, workload: Workload, url: str, model: str) -> Judgement:
    """Let GuideLLM send a workload to a server, and return its judgement. Raises RuntimeError if GuideLLM fails."""
    config = tool.scratch / "guidellm_config.json"
    config.write_text(json.dumps({"spec": _spec(tool.scratch, workload, url, model)}))
    tool.run("guidellm", "run", "--config", str(config), "--disable-console-interactive")
    return judgement(json.loads((tool.scratch / REPORT).read_text()))


def _spec(folder: Path, workload: Workload, url: str, model: str) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "backend": {
            "kind": "openai_http",
            "target": url,
            "model": model,
            "request_format": "/v1/completions",
            "extras": {"body": {"temperature": 0}},
        },
        "tokenizer": {"kind": "huggingface_auto", "model": TOKENIZER},
        "outputs": [{"kind": "json", "path": str(folder / REPORT)}],
    }
    if not workload.rows:
        data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": NEW_TOKENS}
        profile = {"kind": "concurrent", "streams": [workload.concurrency]}
        constraints = [{"kind": "max_requests", "count": workload.num_requests}]
        return {**spec, "data": [data], "profile": profile, "constraints": constraints}
    trace = folder / "trace.jsonl"
    workload.write(trace)
    blocks = {"kind": "mooncake", "hash_id_block_size": BLOCK_TOKENS}
    data = blocks if workload.has_blocks else {"kind": "trace_synthetic"}
    data |= {"source": {"kind": "json_file", "path": str(trace)}, "time_scale": 1e-3}  # timestamps are milliseconds
    return {**spec, "data": [data], "profile": {"kind": "replay"}}


def judgement(report: dict[str, Any]) -> Judgement:
    """Return the judgement of a report with one benchmark."""
    [benchmark] = report["benchmarks"]
    metrics, requests = benchmark["metrics"], benchmark["requests"]

    def summary(name: str) -> dict[str, Any]:
        found: dict[str, Any] = metrics[name]["successful"]
        return found

    first = summary("time_to_first_token_ms")
    figures = RunFigures(
        requests=len(requests["successful"]),
        failed=len(requests["errored"]) + len(requests["incomplete"]),
        request_rate=summary("requests_per_second")["mean"],
        token_rate=summary("output_tokens_per_second")["mean"],
        first_mean_ms=first["mean"],
        first_p50_ms=first["median"],
        first_p95_ms=first["percentiles"]["p95"],
        gap_mean_ms=summary("inter_token_latency_ms")["mean"],
        latency_mean_ms=summary("request_latency")["mean"] * 1e3,
    )
    starts = [one["info"]["timings"]["request_start"] for one in requests["successful"]]
    bodies = [json.loads(one["request_args"])["body"] for one in requests["successful"]]
    return Judgement(figures, in_order(list(zip(starts, bodies, strict=True))))
