"""What engines, embedders and rerankers count anyway, read off at a scrape. Any thread; nothing is waited for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from cellama.engine import EmbedderSnapshot, Engine, EngineSnapshot, Model, StepCounts
from cellama.tasks.metrics.bounded import Bounded
from cellama.tasks.metrics.families import Figures
from cellama.tasks.metrics.rows import FINE_S, STEP_TOKENS, TOKEN_S, Row
from cellama.tasks.metrics.table import ENGINE as VLLM_LABELS
from cellama.tasks.metrics.table import TABLE

from .requests import ENGINE

READ_OFF = [row for row in TABLE.values() if row.field]
OF_ENGINES = [row for row in READ_OFF if "part" not in row.labels]
OF_TEXTS = [row for row in READ_OFF if "part" in row.labels]
TIERS = ("slot", "copy", "ram", "disk")
GAPS_S = tuple(sorted({*TOKEN_S, *FINE_S}))  # the buckets of both histograms of gaps
Loaded = Callable[[], Mapping[str, Model]]


class Engines:
    """The models of a worker. Those of one that is unloaded go with it; loaded again, it begins at 0."""

    def __init__(self, loaded: Loaded, models: Bounded) -> None:
        self._loaded = loaded
        self._models = models
        self._steps: dict[str, StepCounts] = {}  # by model id: of the engine that it had last

    def count_steps(self, model_id: str, engine: Engine) -> None:
        """The steps of this engine are counted from now on."""
        self._steps[model_id] = counts = StepCounts(GAPS_S, STEP_TOKENS)
        engine.count_steps(counts)

    def add_to(self, figures: Figures) -> None:
        """Adds all of them."""
        for model_id, model in self._loaded().items():
            _of_model(figures, self._models.of(model_id), model, self._steps.get(model_id))


def _of_model(figures: Figures, name: str, model: Model, counts: StepCounts | None) -> None:
    snapshot = model.snapshot()
    if snapshot.engine is not None:
        _read_off(figures, OF_ENGINES, snapshot.engine, name)
        _of_engine(figures, name, snapshot.engine)
        if counts is not None:
            _of_steps(figures, name, counts)
    for part, found in (("embedder", snapshot.embedder), ("reranker", snapshot.reranker)):
        if found is not None:
            _read_off(figures, OF_TEXTS, found, name, part)
    figures.add("cellama_model_up", float(snapshot.phase != "stopped"), name)
    figures.add("cellama_model_bytes", model.memory.total_bytes, name)


def _read_off(figures: Figures, rows: list[Row], snapshot: EngineSnapshot | EmbedderSnapshot, *labels: str) -> None:
    for row in rows:
        own = (labels[0], ENGINE) if row.labels == VLLM_LABELS else labels
        figures.add(row.name, getattr(snapshot, row.field), *own)


def _of_engine(figures: Figures, name: str, engine: EngineSnapshot) -> None:
    for tier in TIERS:
        figures.add("cellama_prefix_lookups_total", getattr(engine, f"cache_hits_{tier}"), name, tier)
    figures.add("cellama_prefix_lookups_total", engine.cache_misses, name, "miss")
    drafts = drafted = accepted = 0
    for source, count in dict(engine.drafts).items():
        figures.add("cellama_draft_tokens_total", count.accepted, name, source, "true")
        figures.add("cellama_draft_tokens_total", count.drafted - count.accepted, name, source, "false")
        drafts, drafted, accepted = drafts + count.drafts, drafted + count.drafted, accepted + count.accepted
    figures.add("vllm:spec_decode_num_drafts_total", drafts, name, ENGINE)
    figures.add("vllm:spec_decode_num_draft_tokens_total", drafted, name, ENGINE)
    figures.add("vllm:spec_decode_num_accepted_tokens_total", accepted, name, ENGINE)
    for reason, number in (("capacity", engine.requests_waiting), ("deferred", 0)):
        figures.add("vllm:num_requests_waiting_by_reason", number, name, ENGINE, reason)
    used = engine.kv_used_tokens / engine.kv_total_tokens if engine.kv_total_tokens else 0.0
    figures.add("vllm:kv_cache_usage_perc", used, name, ENGINE)
    figures.add("vllm:cache_config_info", 1, name, ENGINE, str(engine.kv_total_tokens), "1", "True")


def _of_steps(figures: Figures, name: str, counts: StepCounts) -> None:
    gaps, gaps_s = list(counts.gaps), counts.gaps_s
    for metric, *labels in (("vllm:inter_token_latency_seconds", name, ENGINE), ("cellama_token_gap_seconds", name)):
        figures.tally(metric, *labels).add(_coarser(gaps, TABLE[metric].bounds), gaps_s)
    figures.tally("vllm:iteration_tokens_total", name, ENGINE).add(list(counts.batches), counts.tokens)


def _coarser(gaps: Sequence[int], bounds: Sequence[float]) -> list[int]:
    """Gaps, counted between GAPS_S, in the buckets of a histogram, whose bounds are some of these."""
    counts = [0] * (len(bounds) + 1)
    for bound, count in zip((*GAPS_S, math.inf), gaps, strict=True):
        counts[bisect_left(bounds, bound)] += count
    return counts
