"""What was said at run time, in Redis: of the worker's pool, and of the worker alone (docs/adr/012-pools.md)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from cellama.tasks.connection.redis_clock import seconds_of
from cellama.tasks.contract.keys import trials_key, wanted_key
from cellama.tasks.state.scripts import run_script

from .wanted import Key, Said, Spoken, field_of, key_of, key_text, said_of

log = logging.getLogger(__name__)

KEPT_S = 30 * 86400  # after the last sign of a worker; and what says that something is gone
RENEWED_S = 3600.0
MAX_ENTRIES = 2000  # of a record; one with more is not read
MAX_BYTES = 1 << 16  # of an entry
MAX_COMPLAINTS = 100
TRIALS_KEPT_S = 86400

ANY = "any"  # whatever stands there


@dataclass(frozen=True, slots=True)
class _Word:
    """What is to be written: only if the entry is as it was `before`."""

    record: str
    key: Key
    text: str
    before: str


class WantedRecord:
    """Reads what was said, says more, and puts back what Redis has lost. Safe from any thread."""

    def __init__(self, redis: Redis, pool: str, worker: str) -> None:
        self._redis = redis
        self._pool, self._own = wanted_key("pool", pool), wanted_key("worker", worker)
        self._trials = trials_key(worker)
        self._known: dict[str, dict[Key, str]] = {self._pool: {}, self._own: {}}  # the newest, as it stands in Redis
        self._unreadable: dict[Key, str] = {}
        self._unsaid: list[_Word] = []  # until Redis takes it
        self._lock = threading.RLock()
        self._complaints: set[str] = set()  # told already: looks are many
        self._renew_at = 0.0  # monotonic

    @property
    def spoken(self) -> Spoken:
        """As it was at the last look, with what is still to be written."""
        with self._lock:
            known = {record: dict(texts) for record, texts in self._known.items()}
            for word in self._unsaid:
                known[word.record][word.key] = word.text
            pool, own = (_said(known[record]) for record in (self._pool, self._own))
            return Spoken(pool, own, dict(self._unreadable))

    def before(self, key: Key, *, whole_pool: bool) -> str:
        """What stands there, for `say`: '' if nothing does."""
        with self._lock:
            return self._known[self._pool if whole_pool else self._own].get(key, "")

    def say(self, key: Key, said: Said, *, whole_pool: bool, before: str = ANY) -> None:
        """Writes it down, unless another one has said something since `before`; once Redis is back, if it is away."""
        with self._lock:
            self._unsaid.append(_Word(self._pool if whole_pool else self._own, key, said.text(), before))
            if whole_pool and key in self._known[self._own]:
                self._unsaid.append(_Word(self._own, key, Said().text(), ANY))
            try:
                self._write()
            except RedisError as error:
                log.warning("what was loaded or unloaded is written down once Redis answers: %s", error)

    def look(self) -> Spoken:
        """Writes what is still to be written, reads what others said, puts back what is lost. Raises RedisError."""
        with self._lock:
            try:
                self._write()
                found = self._read()
                for record, texts in found.items():
                    self._merge(record, texts)
                self._forget_old(found)
                self._renew()
            except ResponseError as error:  # a key of another type, a missing right: what is known goes on to count
                self._complain(f"what was said of models at run time can't be read: {error}")
            return self.spoken

    def _write(self) -> None:
        while self._unsaid:
            word = self._unsaid[0]
            least_at = _at(self._known[word.record].get(word.key, ""))
            field = field_of(word.key)
            args = [field, word.before, word.text[1:], least_at, MAX_ENTRIES]
            found: Any = run_script(self._redis, "say", [word.record], args)
            entry = self._entry(field.encode(), found) if found else None
            if entry is None:
                log.error("%s is not written down: %s", key_text(word.key), "it is full" if not found else "see above")
                self._known[word.record].pop(word.key, None)
            else:
                self._known[word.record][word.key] = entry[1]
            del self._unsaid[0]

    def _read(self) -> dict[str, dict[Key, str]]:
        pipeline = self._redis.pipeline(transaction=False)
        for record in self._known:
            pipeline.hlen(record)
        lengths = dict(zip(self._known, pipeline.execute(), strict=True))
        self._unreadable = {}
        found: dict[str, dict[Key, str]] = {}
        for record, length in lengths.items():
            if length > MAX_ENTRIES:
                self._complain(f"{record} has more than {MAX_ENTRIES} entries, and is not read")
                continue
            entries: Any = self._redis.hgetall(record)
            found[record] = dict(filter(None, (self._entry(*entry) for entry in entries.items())))
        return found

    def _entry(self, field: bytes, text: bytes) -> tuple[Key, str] | None:
        try:
            key = key_of(field)
        except (ValueError, RecursionError) as error:
            self._complain(f"an entry of what was said of models is skipped: {field[:80]!r}: {error}")
            return None
        try:
            if len(text) > MAX_BYTES:
                raise ValueError(f"it has {len(text)} bytes, and {MAX_BYTES} are the most")
            said_of(key, text)
        except (ValueError, RecursionError) as error:
            self._unreadable[key] = " ".join(str(error).split())[:300]
            return None
        return key, text.decode()

    def _complain(self, text: str) -> None:
        if text not in self._complaints and len(self._complaints) < MAX_COMPLAINTS:
            self._complaints.add(text)
            log.error("%s", text)

    def _merge(self, record: str, found: Mapping[Key, str]) -> None:
        """The newer one of each counts; what Redis has lost, or has in an older form, is written again."""
        known = self._known[record]
        lost = {
            key: text
            for key, text in known.items()
            if key not in self._unreadable and found.get(key) != text and _at(found.get(key, "")) < _at(text)
        }
        if lost:
            log.warning("Redis has lost %d entries of what was said of models; they are written again", len(lost))
            self._redis.hset(record, mapping={field_of(key): text for key, text in lost.items()})
        self._known[record] = {**found, **lost}

    def _forget_old(self, found: Mapping[str, Mapping[Key, str]]) -> None:
        now = seconds_of(self._redis.time())
        for record in found:
            said = _said(self._known[record])
            old = [key for key, one in said.items() if not one.is_live and now - one.at > KEPT_S]
            if old:
                self._redis.hdel(record, *map(field_of, old))
                for key in old:
                    del self._known[record][key]

    def _renew(self) -> None:
        if time.monotonic() >= self._renew_at:
            for record in self._known:
                self._redis.expire(record, KEPT_S)
            self._renew_at = time.monotonic() + RENEWED_S

    # Loads that end the process

    def begin_trial(self, key: Key, most: int) -> bool:
        """Whether it may be loaded: of `most` loads in a row one has ended. Raises RedisError."""
        found: Any = self._redis.hget(self._trials, field_of(key))
        if found is not None and int(found) >= most:
            return False
        self._redis.hincrby(self._trials, field_of(key), 1)
        self._redis.expire(self._trials, TRIALS_KEPT_S)
        return True

    def end_trial(self, key: Key | None) -> None:
        """It ended, well or not; None stands for all."""
        try:
            if key is None:
                self._redis.delete(self._trials)
            else:
                self._redis.hdel(self._trials, field_of(key))
        except RedisError as error:
            log.warning("that a load has ended is not written down: %s", error)


def _said(texts: Mapping[Key, str]) -> dict[Key, Said]:
    return {key: said_of(key, text) for key, text in texts.items()}


def _at(text: str) -> float:
    return Said.model_validate_json(text).at if text else 0.0
