"""What jobs really took, in Redis: the last ones of each model, kind and class, and the last speeds of its workers.

Work of a completion is counted in tokens: those that it made, and for the time in which its prompt was read as many as
it made in that time afterwards. So it hardly depends on the machine, which the speed is for. All other work is counted
in seconds, with speed 1.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from cellama.tasks.contract.keys import speed_key, took_key
from cellama.tasks.contract.names import URGENT_PRIORITIES
from cellama.tasks.state.records import Work

KEPT_S = 30 * 86400
KEPT_SAMPLES, KEPT_SPEEDS = 128, 16  # of each, the last ones
MOST_UNSAVED = 1000
NEAREST = 12  # samples that speak for a job: of those that asked for about as much


@dataclass(frozen=True, slots=True)
class Class:
    """Jobs that are alike but for their size."""

    queue: str
    kind: str
    is_bulk: bool

    @property
    def key(self) -> str:
        return took_key(self.queue, self.kind, "bulk" if self.is_bulk else "interactive")


def class_of(queue: str, work: Work, priority: int) -> Class:
    return Class(queue, work.kind, priority not in URGENT_PRIORITIES)


@dataclass(slots=True)
class Took:
    """What the jobs of a worker took, on its way to Redis. `note` is for any thread, `flush` for the registry's."""

    redis: Redis
    worker: str
    _unsaved: dict[str, list[str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, kind: Class, asked: int, amount: float, speed: float | None = None, crowd: float = 1.0) -> None:
        """A job that asked for so much was so much work. `crowd` is the part of the slots that were busy then."""
        if not (0 < amount < math.inf and (speed is None or 0 < speed < math.inf)):
            return
        with self._lock:
            if sum(map(len, self._unsaved.values())) < MOST_UNSAVED:
                self._unsaved.setdefault(kind.key, []).append(f"{asked} {amount:.6g}")
                if speed is not None:
                    key = speed_key(kind.queue, self.worker)
                    self._unsaved.setdefault(key, []).append(f"{speed:.6g} {crowd:.3g}")

    def flush(self) -> None:
        """Writes what is new. Raises RedisError; it is written the next time then."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, {}
        pipeline = self.redis.pipeline(transaction=False)
        for key, entries in unsaved.items():
            most = KEPT_SPEEDS if key.startswith(speed_key("", "")[:-1]) else KEPT_SAMPLES
            pipeline.lpush(key, *entries[-most:])
            pipeline.ltrim(key, 0, most - 1)
            pipeline.expire(key, KEPT_S)
        try:
            if unsaved:
                pipeline.execute()
        except Exception:
            with self._lock:
                for key, entries in unsaved.items():
                    self._unsaved[key] = [*entries, *self._unsaved.get(key, [])]
            raise


@dataclass(frozen=True, slots=True)
class Learnt:
    """What is known of jobs of these classes, the last ones first, and of speeds: tokens per second and slot."""

    samples: Mapping[Class, Sequence[tuple[float, float]]]  # asked, amount
    speeds: Mapping[str, Sequence[tuple[float, float]]]  # by worker: speed, and how crowded it was

    def amounts(self, kind: Class, work: Work) -> list[float]:
        """How much work such a job may be, each as likely as the others; empty if nothing is known."""
        found = self.samples.get(kind) or self.samples.get(Class(kind.queue, kind.kind, not kind.is_bulk)) or ()
        asked = max(1, work.asked)
        nearest = sorted(found, key=lambda sample: abs(math.log(sample[0] / asked)))[:NEAREST]
        return [amount * asked / size for size, amount in nearest]

    def num_samples(self) -> int:
        """Jobs that it was learnt from."""
        return sum(map(len, self.samples.values()))

    def speeds_of(self, worker: str) -> list[float]:
        """The last ones of a worker, those of a busy one if there are any; else those of all workers."""
        own = self.speeds.get(worker) or [speed for speeds in self.speeds.values() for speed in speeds]
        busy = [speed for speed, crowd in own if crowd > 0.5]
        return (busy or [speed for speed, _ in own])[:KEPT_SPEEDS]


def read_learnt(redis: Redis, kinds: Iterable[Class], queue: str, workers: Sequence[str]) -> Learnt:
    """What is known of these. Raises RedisError. What no worker wrote is left out."""
    wanted = list(dict.fromkeys(each for k in kinds for each in (k, Class(k.queue, k.kind, not k.is_bulk))))
    pipeline = redis.pipeline(transaction=False)
    for kind in wanted:
        pipeline.lrange(kind.key, 0, KEPT_SAMPLES - 1)
    for worker in workers:
        pipeline.lrange(speed_key(queue, worker), 0, KEPT_SPEEDS - 1)
    found: list[Any] = pipeline.execute(raise_on_error=False)
    pairs = [_pairs(entries) for entries in found]
    samples, speeds = pairs[: len(wanted)], pairs[len(wanted) :]
    return Learnt(dict(zip(wanted, samples, strict=True)), dict(zip(workers, speeds, strict=True)))


def _pairs(entries: Any) -> list[tuple[float, float]]:
    """The pairs of positive numbers among what stands there."""
    pairs = []
    for entry in entries if isinstance(entries, list) else ():
        try:
            first, second = map(float, entry.split())
        except (ValueError, AttributeError):
            continue
        if 0 < first < math.inf and 0 < second < math.inf:
            pairs.append((first, second))
    return pairs
