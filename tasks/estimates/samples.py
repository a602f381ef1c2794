"""Store work samples from finished jobs in Redis, which keeps the latest samples for each queue, kind and class.

The work of a completion is counted in tokens: the generated tokens, plus the tokens that could have been generated
while its prompt was prefilled. This number hardly depends on the machine or its load. The speed depends on the machine
and its load, so the speed is stored separately. The work of all other jobs is counted in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from redis import Redis

from cellama.tasks.contract.keys import service_times_key
from cellama.tasks.contract.names import URGENT_PRIORITIES
from cellama.tasks.state.ledger import JobWork

SAMPLES_TTL_S = 30 * 86400  # samples of a model that was not used for a month may be from another machine
MAX_SAMPLES = 128  # per class, ten times as many as an estimate uses, to cover jobs of all sizes
MAX_UNSAVED = 1000  # samples between two heartbeats, more than a worker finishes jobs in 2 s
NUM_NEAREST = 12  # samples that an estimate uses, from the jobs with the most similar size
NUM_SPEEDS = 16  # latest samples whose speeds are used while no engine reports one


@dataclass(frozen=True, slots=True)
class JobClass:
    """A class of jobs that differ only in size."""

    queue: str
    kind: str
    is_bulk: bool

    @property
    def key(self) -> str:
        return service_times_key(self.queue, self.kind, "bulk" if self.is_bulk else "interactive")


def class_of(queue: str, work: JobWork, priority: int) -> JobClass:
    return JobClass(queue, work.sample_kind, priority not in URGENT_PRIORITIES)


class SampleWriter:
    """Writes the samples of one worker to Redis. Any thread may call `note`, and the registry thread calls `flush`."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._unsaved: deque[tuple[str, str]] = deque(maxlen=MAX_UNSAVED)

    def note(self, kind: JobClass, *, size: int, amount: float, speed: float = 1.0) -> None:
        """Record how much work was done for a job that requested `size` tokens or texts.

        `speed` is in tokens per second and slot, or 1 for work that is counted in seconds.
        """
        if 0 < amount < math.inf and 0 < speed < math.inf:
            self._unsaved.append((kind.key, f"{size} {amount:.6g} {speed:.6g}"))

    def flush(self) -> None:
        """Write the new samples.

        If this call raises RedisError, the samples are lost, which makes estimates less precise.
        """
        pipeline = self._redis.pipeline(transaction=False)
        while self._unsaved:
            key, entry = self._unsaved.popleft()
            pipeline.lpush(key, entry)
            pipeline.ltrim(key, 0, MAX_SAMPLES - 1)
            pipeline.expire(key, SAMPLES_TTL_S)
        pipeline.execute()


@dataclass(frozen=True, slots=True)
class Sample:
    """The size, work and speed of a finished job."""

    size: float  # requested tokens or texts
    amount: float  # tokens or seconds of work
    speed: float  # tokens per second and slot, or 1


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of several classes, latest first."""

    by_class: Mapping[JobClass, Sequence[Sample]]

    def amounts(self, kind: JobClass, size: int) -> list[float]:
        """Return equally likely amounts of work for a job, or an empty list if no similar job has finished."""
        other = JobClass(kind.queue, kind.kind, not kind.is_bulk)
        samples = self.by_class.get(kind) or self.by_class.get(other) or ()
        nearest = sorted(samples, key=lambda sample: abs(math.log(sample.size / size)))[:NUM_NEAREST]
        return [sample.amount * size / sample.size for sample in nearest]

    @property
    def speed(self) -> float | None:
        """Return the mean speed of the latest jobs with work counted in tokens, or None if there are no such jobs."""
        classes = [samples for kind, samples in self.by_class.items() if JobWork.of_kind(kind.kind).counts_tokens]
        speeds = [sample.speed for samples in classes for sample in samples[:NUM_SPEEDS]]
        return mean(speeds) if speeds else None

    @property
    def num_samples(self) -> int:
        return sum(map(len, self.by_class.values()))


def read_samples(redis: Redis, kinds: Iterable[JobClass]) -> Samples:
    """Read the samples of these classes, and of their bulk or interactive counterparts. Raises RedisError.

    Invalid entries are skipped.
    """
    classes = list(dict.fromkeys(each for k in kinds for each in (k, JobClass(k.queue, k.kind, not k.is_bulk))))
    pipeline = redis.pipeline(transaction=False)
    for kind in classes:
        pipeline.lrange(kind.key, 0, MAX_SAMPLES - 1)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return Samples({kind: _valid(entries) for kind, entries in zip(classes, replies, strict=True)})


def _valid(entries: Any) -> list[Sample]:
    samples = []
    for entry in entries if isinstance(entries, list) else ():
        try:
            size, amount, speed = map(float, entry.split())
        except (ValueError, AttributeError):
            continue
        if all(0 < value < math.inf for value in (size, amount, speed)):
            samples.append(Sample(size, amount, speed))
    return samples
