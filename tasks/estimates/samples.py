"""Samples of the work of ended jobs, in Redis: the last ones of each model, kind and class.

The work of a completion is counted in tokens: those that it generated, plus as many as it would have generated while
its prompt was processed. This number hardly depends on the machine and on what else the machine computes; the speed
does, and is kept separately. All other work is counted in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from redis import Redis

from cellama.tasks.contract.keys import took_key
from cellama.tasks.contract.names import URGENT_PRIORITIES
from cellama.tasks.state.records import JobWork

KEPT_S = 30 * 86400  # a model that was not used for a month may run elsewhere by now
KEPT_SAMPLES = 128  # of each class: ten times as many as speak for one job, for jobs of all sizes
MAX_UNSAVED = 1000  # samples between two heartbeats: more than any worker ends jobs in 2 s
NEAREST = 12  # samples that speak for a job: of the jobs that asked for about as much
NUM_SPEEDS = 16  # samples whose speeds count while an engine reports none: the speed of today, not of last week


@dataclass(frozen=True, slots=True)
class JobClass:
    """Jobs that are alike except for their size."""

    queue: str
    kind: str
    is_bulk: bool

    @property
    def key(self) -> str:
        return took_key(self.queue, self.kind, "bulk" if self.is_bulk else "interactive")


def class_of(queue: str, work: JobWork, priority: int) -> JobClass:
    return JobClass(queue, work.sample_kind, priority not in URGENT_PRIORITIES)


class SampleWriter:
    """Samples of one worker, on their way to Redis. Any thread may call `note`, the registry's thread calls `flush`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._unsaved: deque[tuple[str, str]] = deque(maxlen=MAX_UNSAVED)

    def note(self, kind: JobClass, *, asked: int, amount: float, speed: float = 1.0) -> None:
        """Note the amount of work of a job that asked for that number of tokens or texts.

        `speed` is in tokens per second and slot; 1 for work that is counted in seconds.
        """
        if 0 < amount < math.inf and 0 < speed < math.inf:
            self._unsaved.append((kind.key, f"{asked} {amount:.6g} {speed:.6g}"))

    def flush(self) -> None:
        """Write the new samples. Raises RedisError; these samples are lost then, which only delays learning."""
        pipeline = self._redis.pipeline(transaction=False)
        while self._unsaved:
            key, entry = self._unsaved.popleft()
            pipeline.lpush(key, entry)
            pipeline.ltrim(key, 0, KEPT_SAMPLES - 1)
            pipeline.expire(key, KEPT_S)
        pipeline.execute()


@dataclass(frozen=True, slots=True)
class Sample:
    """A job that has ended: how much it asked for, how much work it was, and how fast that went."""

    asked: float
    amount: float
    speed: float


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of these classes, the latest first."""

    by_class: Mapping[JobClass, Sequence[Sample]]

    def amounts(self, kind: JobClass, asked: int) -> list[float]:
        """Return how much work such a job may be, each as likely as the others; empty if no such job has ended."""
        other = JobClass(kind.queue, kind.kind, not kind.is_bulk)
        found = self.by_class.get(kind) or self.by_class.get(other) or ()
        nearest = sorted(found, key=lambda sample: abs(math.log(sample.asked / asked)))[:NEAREST]
        return [sample.amount * asked / sample.asked for sample in nearest]

    @property
    def speed(self) -> float | None:
        """The mean speed of the last jobs that counted tokens; None if none has ended."""
        classes = [samples for kind, samples in self.by_class.items() if JobWork.of_kind(kind.kind).counts_tokens]
        speeds = [sample.speed for samples in classes for sample in samples[:NUM_SPEEDS]]
        return mean(speeds) if speeds else None

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.by_class.values()))


def read_samples(redis: Redis, kinds: Iterable[JobClass]) -> Samples:
    """Read the samples of these classes and of their bulk or interactive counterparts. Raises RedisError.

    Entries that no worker wrote are left out.
    """
    wanted = list(dict.fromkeys(each for k in kinds for each in (k, JobClass(k.queue, k.kind, not k.is_bulk))))
    pipeline = redis.pipeline(transaction=False)
    for kind in wanted:
        pipeline.lrange(kind.key, 0, KEPT_SAMPLES - 1)
    found: list[Any] = pipeline.execute(raise_on_error=False)
    return Samples({kind: _valid(entries) for kind, entries in zip(wanted, found, strict=True)})


def _valid(entries: Any) -> list[Sample]:
    samples = []
    for entry in entries if isinstance(entries, list) else ():
        try:
            asked, amount, speed = map(float, entry.split())
        except (ValueError, AttributeError):
            continue
        if all(0 < value < math.inf for value in (asked, amount, speed)):
            samples.append(Sample(asked, amount, speed))
    return samples
