"""The table of metrics is complete and valid for Prometheus."""

from __future__ import annotations

import re

import pytest

from cellama.engine import EmbedderSnapshot, EngineSnapshot
from cellama.tasks.metrics.table import ATTEMPTS, ENGINES, GATEWAY, QUEUES, TABLE, VLLM, Row

ROWS = (*VLLM, *ENGINES, *ATTEMPTS, *QUEUES, *GATEWAY)
UNBOUNDED = {"job", "job_id", "request_id", "key", "key_id", "worker", "path"}


def test_table_contains_each_metric_name_once() -> None:
    assert len(ROWS) == len(TABLE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_table_row_is_valid_for_prometheus(row: Row) -> None:
    assert re.fullmatch(r"(vllm:|cellama_|celery_)[a-z0-9_]+", row.name)
    assert row.help
    assert all(re.fullmatch(r"[a-z_]+", label) for label in row.labels)
    assert row.kind == "histogram" or row.name.endswith("_total") == (row.kind == "counter")
    assert list(row.bounds) == sorted(set(row.bounds))
    assert bool(row.bounds) == (row.kind == "histogram")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_table_row_has_only_labels_with_few_values(row: Row) -> None:
    assert not UNBOUNDED & set(row.labels)


def test_fields_of_table_rows_exist_in_snapshots() -> None:
    known = set(EngineSnapshot.__dataclass_fields__) | set(EmbedderSnapshot.__dataclass_fields__)
    assert {row.field for row in ROWS if row.field} <= known
