"""Hold the values of metrics: a `Meter` counts continuously, and `Figures` hold the values collected for a scrape."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from .table import TABLE, Row

OTHER = "other"  # replaces the values of a label that exceed the limit
MAX_LABEL_VALUES = 100  # per label that users choose, far more than the models or keys of one board
Labels = tuple[str, ...]


@dataclass(slots=True)
class Tally:
    """The values of a histogram: the count of each bucket, including the unbounded last bucket, and the sum."""

    counts: list[int]
    total: float = 0.0

    @classmethod
    def of(cls, row: Row) -> Tally:
        return cls([0] * (len(row.bounds) + 1))

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add the values of another histogram with the same buckets."""
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)]
        self.total += total


@dataclass(slots=True)
class Figures:
    """Collected values, keyed by metric name and label values, in the order of the table."""

    numbers: dict[str, dict[Labels, float]] = field(default_factory=dict)
    tallies: dict[str, dict[Labels, Tally]] = field(default_factory=dict)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add `value` to a metric. Values with equal labels, such as `other`, are summed."""
        values = self.numbers.setdefault(name, {})
        values[labels] = values.get(labels, 0.0) + value

    def tally(self, name: str, *labels: str) -> Tally:
        """Return the values of a histogram, which the caller can modify."""
        tallies = self.tallies.setdefault(name, {})
        if (tally := tallies.get(labels)) is None:
            tally = tallies[labels] = Tally.of(TABLE[name])
        return tally

    def families(self) -> Iterable[Metric]:
        """Yield the metrics in the order of the table. Raises KeyError for a name that is not in the table."""
        unknown = (self.numbers.keys() | self.tallies.keys()) - TABLE.keys()
        if unknown:
            raise KeyError(f"metrics missing from the table: {', '.join(sorted(unknown))}")
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
    """Yield the cumulative counts that Prometheus expects, each with its upper bound."""
    below = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        below += count
        yield floatToGoString(bound), below  # type: ignore[no-untyped-call]


def _checked(row: Row, labels: Labels) -> Labels:
    if len(labels) != len(row.labels):
        raise KeyError(f"{row.name}: {len(labels)} values do not match the labels {row.labels}")
    return labels


class Meter:
    """Counts values from any thread, under one lock.

    Methods are called once per request, attempt or response, but never once per token.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = Figures()

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add `by` to a counter."""
        with self._lock:
            self._figures.add(name, by, *labels)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram. A negative value, which can occur if clocks differ, counts as 0."""
        value = max(0.0, value)
        with self._lock:
            tally = self._figures.tally(name, *labels)
            tally.counts[bisect_left(TABLE[name].bounds, value)] += 1
            tally.total += value

    def add_to(self, figures: Figures) -> None:
        """Add all counted values to these figures."""
        with self._lock:
            for name, values in self._figures.numbers.items():
                for labels, value in values.items():
                    figures.add(name, value, *labels)
            for name, tallies in self._figures.tallies.items():
                for labels, tally in tallies.items():
                    figures.tally(name, *labels).add(tally.counts, tally.total)


class Bounded:
    """Limits the number of distinct values of a label.

    Accepted values are kept, so no counter decreases. Thread-safe.
    """

    def __init__(self, max_values: int = MAX_LABEL_VALUES) -> None:
        self._max_values = max_values
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self.num_dropped = 0  # number of calls that returned OTHER

    def of(self, value: str) -> str:
        """Return the value, or OTHER if the limit is reached and the value is new."""
        with self._lock:
            if value not in self._known and len(self._known) >= self._max_values:
                self.num_dropped += 1
                return OTHER
            self._known.add(value)
            return value
