"""The board and the alerts that ship name metrics and labels that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from cellama.tasks.metrics.table import TABLE

from ..ci_scripts import ci_script

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "docs" / "dashboards"
NAME = re.compile(r"\b(?:cellama_|celery_|vllm:)[a-z0-9_]+\b")
OF_TARGETS = {"job", "instance", "le"}  # labels that Prometheus adds
LABELS = re.compile(r"by \(([a-z_, ]+)\)|\{([^}]*)\}")


@pytest.fixture(scope="module")
def board() -> ModuleType:
    return ci_script("board")


def alert_rules() -> list[dict[str, str]]:
    groups = yaml.safe_load((DASHBOARDS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def board_expressions() -> list[str]:
    told = json.loads((DASHBOARDS / "cellama.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in told["panels"] for target in panel.get("targets", ())]


# The metrics of the overview dashboard of vLLM (examples/observability/dashboards/grafana/vllm_overview.json), without
# those of its HTTP server and its image cache.
OVERVIEW = {
    "vllm:e2e_request_latency_seconds",
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds",
    "vllm:iteration_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds",
    "vllm:request_generation_tokens",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_queue_time_seconds",
    "vllm:request_success_total",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
}
EXPRESSIONS = [*board_expressions(), *(rule["expr"] for rule in alert_rules())]


def row_of(name: str) -> str:
    return name if name in TABLE else re.sub(r"_(bucket|sum|count)$", "", name)


def test_dashboard_equals_the_generated_dashboard(board: ModuleType) -> None:
    assert (DASHBOARDS / "cellama.json").read_text(encoding="utf-8") == board.text(), "run: python .ci/board.py"


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_use_existing_metrics(expression: str) -> None:
    bare = re.sub(r'"[^"]*"', '""', expression)
    names = {row_of(name) for name in NAME.findall(bare)}
    assert names or "process_" in bare
    assert names <= TABLE.keys()
    told = {label for name in names for label in TABLE[name].labels} | OF_TARGETS
    for by, within in LABELS.findall(bare):
        used = by.replace(" ", "").split(",") if by else re.findall(r"([a-z_]+)\s*(?:=|!)", within)
        assert set(used) <= told, expression


def test_metrics_cover_the_vllm_overview() -> None:
    assert TABLE.keys() >= OVERVIEW


def test_counters_appear_only_within_rates() -> None:
    for expression in EXPRESSIONS:
        bare = re.sub(r"rate\([^)]*\)", "", expression)
        assert not [name for name in NAME.findall(bare) if name in TABLE and TABLE[name].kind == "counter"], expression


def test_alerts_describe_the_remedy() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert {"summary", "description"} <= set(rule["annotations"]), rule["alert"]  # type: ignore[arg-type]
