"""Write the Grafana dashboard docs/dashboards/cellama.json from a table of panels: `python .ci/board.py`.

Expressions use `$model` for the selected models, and Grafana's variable `$__rate_interval`. Sums over workers are sums
of rates, so they don't drop when a worker exits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parents[1] / "docs" / "dashboards" / "cellama.json"
HEIGHT, PER_ROW, WIDTH = 7, 3, 24

M, V = 'model=~"$model"', 'model_name=~"$model"'
OURS = "cellama_model_up or cellama_http_requests_in_flight or cellama_up"  # every process exports one of these metrics


def rate(name: str, labels: str = "", by: str = "") -> str:
    inner = f"rate({name}{{{labels}}}[$__rate_interval])" if labels else f"rate({name}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def quantile(part: float, name: str, labels: str, by: str) -> str:
    return f"histogram_quantile({part}, sum by (le, {by}) (rate({name}_bucket{{{labels}}}[$__rate_interval])))"


def quantiles(name: str, labels: str, by: str) -> list[tuple[str, str]]:
    return [(quantile(part, name, labels, by), f"p{100 * part:.0f} {{{{{by}}}}}") for part in (0.5, 0.95)]


# Row: title, and panels of title, unit, expressions with their legends.
ROWS: list[tuple[str, list[tuple[str, str, list[tuple[str, str]]]]]] = [
    (
        "Queues",
        [
            (
                "Waiting jobs",
                "short",
                [(f"max by (model, class) (cellama_jobs_waiting{{{M}}})", "{{model}} {{class}}")],
            ),
            (
                "Age of the oldest waiting job",
                "s",
                [(f"max by (model, class) (cellama_oldest_waiting_seconds{{{M}}})", "{{model}} {{class}}")],
            ),
            (
                "Estimated wait of a new job",
                "s",
                [(f"max by (model, class) (cellama_queue_eta_seconds{{{M}}})", "{{model}} {{class}}")],
            ),
            ("Workers per queue", "short", [(f"max by (model) (cellama_queue_workers{{{M}}})", "{{model}}")]),
            (
                "Running jobs",
                "short",
                [(f"max by (model, class) (cellama_jobs_running{{{M}}})", "{{model}} {{class}}")],
            ),
            ("Messages in Redis", "short", [("max by (queue) (celery_queue_length)", "{{queue}}")]),
        ],
    ),
    (
        "Latency",
        [
            ("Time to first token", "s", quantiles("cellama_first_token_seconds", M, "model")),
            ("Time between tokens", "s", quantiles("cellama_token_gap_seconds", M, "model")),
            ("Request duration", "s", quantiles("vllm:e2e_request_latency_seconds", V, "model_name")),
            (
                "Requests by finish reason",
                "reqps",
                [(rate("cellama_requests_total", M, "model, finish_reason"), "{{model}} {{finish_reason}}")],
            ),
            (
                "HTTP responses",
                "reqps",
                [(rate("cellama_http_requests_total", "", "route, status"), "{{route}} {{status}}")],
            ),
            (
                "HTTP time to first byte, p95",
                "s",
                [
                    (
                        "histogram_quantile(0.95, sum by (le, route) (rate"
                        "(cellama_http_first_byte_seconds_bucket[$__rate_interval])))",
                        "{{route}}",
                    )
                ],
            ),
        ],
    ),
    (
        "Throughput",
        [
            (
                "Tokens generated",
                "short",
                [(rate("vllm:generation_tokens_total", V, "model_name"), "{{model_name}} /s")],
            ),
            (
                "Prompt tokens",
                "short",
                [
                    (rate("vllm:prompt_tokens_total", V, "model_name"), "{{model_name}} asked /s"),
                    (rate("vllm:prompt_tokens_cached_total", V, "model_name"), "{{model_name}} cached /s"),
                ],
            ),
            (
                "Slots",
                "short",
                [
                    (f"sum by (model) (cellama_slots{{{M}}})", "{{model}} all"),
                    (f"sum by (model) (cellama_slots_decoding{{{M}}})", "{{model}} decode"),
                    (f"sum by (model) (cellama_slots_prefilling{{{M}}})", "{{model}} prefill"),
                ],
            ),
            (
                "Mean batch size in tokens",
                "short",
                [
                    (
                        f"sum by (model_name) (rate(vllm:iteration_tokens_total_sum{{{V}}}[$__rate_interval])) / "
                        f"sum by (model_name) (rate(vllm:iteration_tokens_total_count{{{V}}}[$__rate_interval]))",
                        "{{model_name}}",
                    )
                ],
            ),
            ("Preemptions", "short", [(rate("vllm:num_preemptions_total", V, "model_name"), "{{model_name}} /s")]),
            (
                "Embedded and ranked texts",
                "short",
                [(rate("cellama_texts_total", M, "model, part"), "{{model}} {{part}} /s")],
            ),
        ],
    ),
    (
        "Caches and speculation",
        [
            (
                "KV cells in use",
                "percentunit",
                [(f"max by (model_name) (vllm:kv_cache_usage_perc{{{V}}})", "{{model_name}}")],
            ),
            (
                "Prompt tokens from the cache",
                "percentunit",
                [
                    (
                        f"{rate('vllm:prompt_tokens_cached_total', V, 'model_name')} / "
                        f"{rate('vllm:prompt_tokens_total', V, 'model_name')}",
                        "{{model_name}}",
                    )
                ],
            ),
            ("Prefix hits by tier", "short", [(rate("cellama_prefix_lookups_total", M, "tier"), "{{tier}} /s")]),
            (
                "KV states in RAM and on disk",
                "bytes",
                [
                    (f"sum by (model) (cellama_ram_bytes{{{M}}})", "{{model}} RAM"),
                    ("max(cellama_disk_bytes)", "folder"),
                ],
            ),
            (
                "Draft tokens accepted",
                "percentunit",
                [
                    (
                        f"{rate('vllm:spec_decode_num_accepted_tokens_total', V, 'model_name')} / "
                        f"{rate('vllm:spec_decode_num_draft_tokens_total', V, 'model_name')}",
                        "{{model_name}}",
                    )
                ],
            ),
            (
                "KV states dropped",
                "short",
                [
                    (rate("cellama_ram_evictions_total", M, "model"), "{{model}} RAM /s"),
                    (rate("cellama_disk_evictions_total", M, "model"), "{{model}} disk /s"),
                ],
            ),
        ],
    ),
    (
        "Delivery, tenants, memory",
        [
            (
                "Resumed and restarted attempts",
                "short",
                [
                    (rate("cellama_attempts_total", f'{M}, first="false"', "model"), "{{model}} again /s"),
                    (rate("cellama_attempt_ends_total", f'{M}, end=~"handed_back|superseded"', "end"), "{{end}} /s"),
                ],
            ),
            (
                "Dead-letter and missing jobs",
                "short",
                [
                    ("max(cellama_dead_jobs)", "dead"),
                    ("max(cellama_ledger_missing)", "missing"),
                    ("max(cellama_ledger_leases_overdue)", "leases overdue"),
                ],
            ),
            ("Lines of bulk runs", "short", [("max by (state) (cellama_bulk_lines)", "{{state}}")]),
            ("Tokens by tenant", "short", [(rate("cellama_tenant_tokens_total", "", "tenant"), "{{tenant}} /s")]),
            (
                "Memory",
                "bytes",
                [
                    (f"process_resident_memory_bytes and on (job, instance) ({OURS})", "{{job}} {{instance}}"),
                    ("max(cellama_redis_memory_bytes)", "Redis"),
                ],
            ),
            (
                "Workers",
                "short",
                [("max(cellama_workers)", "live"), ("max(cellama_worker_age_seconds)", "oldest heartbeat, s")],
            ),
        ],
    ),
]


def board() -> dict[str, Any]:
    """Return the dashboard in the format that Grafana 10 and later use."""
    panels: list[dict[str, Any]] = []
    at = 0
    for title, group in ROWS:
        place = {"x": 0, "y": at, "w": WIDTH, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        for number, (name, unit, shown) in enumerate(group):
            width, row = WIDTH // PER_ROW, number // PER_ROW
            place = {"x": number % PER_ROW * width, "y": at + 1 + row * HEIGHT, "w": width, "h": HEIGHT}
            panels.append(_panel(len(panels) + 1, name, unit, shown, place))
        at += 1 + -(-len(group) // PER_ROW) * HEIGHT
    return {
        "uid": "cellama",
        "title": "cellama",
        "tags": ["cellama"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _models()]},
        "panels": panels,
    }


def _panel(number: int, title: str, unit: str, shown: list[tuple[str, str]], place: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + place), "expr": expression, "legendFormat": legend, "datasource": source}
        for place, (expression, legend) in enumerate(shown)
    ]
    defaults = {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "showPoints": "never"}}
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _models() -> dict[str, Any]:
    return {
        "name": "model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": 'label_values({__name__=~"cellama_jobs_waiting|cellama_slots"}, model)',
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def text() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    BOARD.write_text(text(), encoding="utf-8")
    sys.exit(0)
