"""The values of metrics: `Figures` are read off at a scrape, a `Meter` counts until then."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from .table import TABLE, Row

OTHER = "other"  # a label whose value is one too many
MAX_LABEL_VALUES = 100  # of a label that users choose: far more than the models or keys of one board
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


class Meter:
    """One lock for all, held for a few additions: each happens once per request, attempt or answer, not per token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = Figures()

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Adds to a counter."""
        with self._lock:
            self._figures.add(name, by, *labels)

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Adds a value to a histogram; one that is below 0 (clocks) counts as 0."""
        value = max(0.0, value)
        with self._lock:
            tally = self._figures.tally(name, *labels)
            tally.counts[bisect_left(TABLE[name].bounds, value)] += 1
            tally.total += value

    def add_to(self, figures: Figures) -> None:
        """Puts all that was counted into these. Any thread."""
        with self._lock:
            for name, values in self._figures.numbers.items():
                for labels, value in values.items():
                    figures.add(name, value, *labels)
            for name, tallies in self._figures.tallies.items():
                for labels, tally in tallies.items():
                    figures.tally(name, *labels).add(tally.counts, tally.total)


class Bounded:
    """The first values stay for the life of the process, so that no counter goes down. Any thread."""

    def __init__(self, most: int = MAX_LABEL_VALUES) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()
        self.num_dropped = 0  # how often there was no room for one

    def of(self, value: str) -> str:
        """The value, or OTHER if there were too many others."""
        with self._lock:
            if value not in self._known and len(self._known) >= self._most:
                self.num_dropped += 1
                return OTHER
            self._known.add(value)
            return value
