"""Read metrics with the parser of Prometheus' client."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def sample(text: str, metric: str, /, **labels: str) -> float | None:
    """Return the first sample with this name and at least these labels, or None."""
    for family in text_string_to_metric_families(text):
        for found in family.samples:
            if found.name == metric and labels.items() <= found.labels.items():
                return float(found.value)
    return None
