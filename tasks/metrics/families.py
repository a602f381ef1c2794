"""Rows of the table with their values, as prometheus_client's families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from .rows import Row
from .table import TABLE

Labels = tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """A histogram's values: how many lie in each bucket (the last one has no bound), and their sum."""

    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, row: Row) -> Tally:
        return cls([0] * (len(row.bounds) + 1))

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds those of another one with the same buckets."""
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)]
        self.total += total


@dataclass(slots=True)
class Figures:
    """What a collector has found, by name and values of labels, in the order of the table's labels."""

    numbers: dict[str, dict[Labels, float]] = field(default_factory=dict)
    tallies: dict[str, dict[Labels, Tally]] = field(default_factory=dict)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Adds to a number; of several that share their labels (`other`) it is the sum."""
        values = self.numbers.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + value

    def tally(self, name: str, *labels: str) -> Tally:
        """That of a histogram, to be added to; it is empty at first."""
        tallies = self.tallies.setdefault(name, {})
        if (tally := tallies.get(labels)) is None:
            tally = tallies[labels] = Tally.of(TABLE[name])
        return tally

    def families(self) -> Iterable[Metric]:
        """In the order of the table. Raises KeyError for a name that is not in it."""
        unknown = (self.numbers.keys() | self.tallies.keys()) - TABLE.keys()
        if unknown:
            raise KeyError(f"{', '.join(sorted(unknown))}: not in the table of metrics")
        for row in TABLE.values():
            if row.name in self.numbers:
                yield _numbers(row, self.numbers[row.name])
            if row.name in self.tallies:
                yield _tallies(row, self.tallies[row.name])


def _numbers(row: Row, values: Mapping[Labels, float]) -> Metric:
    family = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(
        row.name, row.help, labels=row.labels
    )
    for labels, value in values.items():
        family.add_metric(_checked(row, labels), value)
    return family


def _tallies(row: Row, values: Mapping[Labels, Tally]) -> Metric:
    family = HistogramMetricFamily(row.name, row.help, labels=row.labels)
    for labels, tally in values.items():
        family.add_metric(_checked(row, labels), list(_buckets(row.bounds, tally.counts)), tally.total)
    return family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> Iterable[tuple[str, float]]:
    """Each with all below it, as Prometheus wants them."""
    below = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        below += count
        yield floatToGoString(bound), below  # type: ignore[no-untyped-call]


def _checked(row: Row, labels: Labels) -> Labels:
    if len(labels) != len(row.labels):
        raise KeyError(f"{row.name} has the labels {row.labels}, and was given {len(labels)} values")
    return labels
