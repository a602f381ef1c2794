"""The work file of a run: its lines and what became of them, on disk. Memory does not grow with the lines."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .lines import BatchLine, LineId, StoredLine

PENDING, IN_FLIGHT, FINISHED, FAILED, TWIN = range(5)  # a twin waits for what becomes of an identical line
LINES_PER_TRANSACTION = 2000  # of a first reading: the log of a transaction takes room on the disk
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS outdated (id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS lines (
  number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, hash TEXT NOT NULL, form TEXT NOT NULL, kind TEXT NOT NULL,
  model TEXT NOT NULL, key TEXT NOT NULL, params TEXT NOT NULL,
  state INTEGER NOT NULL DEFAULT 0, tries INTEGER NOT NULL DEFAULT 0, chunk TEXT, place INTEGER, outcome TEXT,
  merges INTEGER NOT NULL DEFAULT 0, columns TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX IF NOT EXISTS plan ON lines (model, tries > 0, key, number) WHERE state = 0;
CREATE INDEX IF NOT EXISTS chunks ON lines (chunk) WHERE state = 1;
CREATE INDEX IF NOT EXISTS twins ON lines (hash, number) WHERE merges;
CREATE INDEX IF NOT EXISTS held ON lines (number) WHERE outcome IS NOT NULL;
"""
_LINE = "number, id, form, kind, model, params, tries, place, state, columns"


class WorkFile:
    """Owned by one command at a time: a second one is refused by `open`."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file and locks it. Raises sqlite3.OperationalError if another command has it."""
        self.path = path
        self._pending: Counter[str] | None = None
        self._num_added = 0
        self._is_first_reading = False
        self._had_results = False  # before this reading
        self._db = sqlite3.connect(path, isolation_level=None, timeout=0.5)
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("PRAGMA temp_store = FILE")
            self._db.execute("PRAGMA cache_size = -8192")
            self._db.executescript(_SCHEMA)
        except BaseException:
            self._db.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it on disk at the end, or nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite itself ends one for which there is no room
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def get(self, name: str, default: str = "") -> str:
        """A fact about the run."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else default

    def note(self, **facts: str | int) -> None:
        rows = [(name, str(value)) for name, value in facts.items()]
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    # Reading the input

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """The whole input is added inside; lines that it has no more are forgotten at the end.

        If it raises, the lines are those of the reading before. The first one is committed in pieces.
        """
        self._is_first_reading = self._db.execute("SELECT 1 FROM lines LIMIT 1").fetchone() is None
        self._had_results = self.count(FINISHED) > 0
        with self.transaction():
            # Lines of an earlier reading have negative numbers until the input has them again.
            self._db.execute("UPDATE lines SET number = -number WHERE number > 0")
            yield
            self._end_reading()

    def add(self, line: BatchLine, *, merge: bool = False) -> int | None:
        """Notes a line of the input; returns the number of an earlier one with its id, if there is one.

        A line that was there with the same content keeps its state. With `merge` it takes over what becomes of an
        earlier line with the same content.
        """
        self._save_now_and_then()
        line_id = _written(line.id)
        known = self._db.execute("SELECT number, hash, state FROM lines WHERE id = ?", (line_id,)).fetchone()
        if known is not None and known[0] > 0:
            return int(known[0])
        if known is not None and known[1] == line.hash:
            row = (line.number, merge, json.dumps(line.columns), line_id)
            self._db.execute("UPDATE lines SET number = ?, merges = ?, columns = ? WHERE id = ?", row)
            return None
        if known is not None and known[2] in (IN_FLIGHT, FINISHED):
            self._db.execute("INSERT OR IGNORE INTO outdated VALUES (?)", (line_id,))
        self._db.execute("DELETE FROM lines WHERE id = ?", (line_id,))
        texts = (line_id, line.hash, line.form, line.kind, line.model, line.key, json.dumps(line.params))
        names = "number, id, hash, form, kind, model, key, params, merges, columns"
        values = (line.number, *texts, merge, json.dumps(line.columns))
        self._db.execute(f"INSERT INTO lines ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return None

    def _save_now_and_then(self) -> None:
        self._num_added += 1
        if self._num_added % LINES_PER_TRANSACTION == 0 and self._is_first_reading:
            self._db.execute("COMMIT")
            self._db.execute("BEGIN IMMEDIATE")

    def keeps_results(self) -> bool:
        """Within a reading: False if there are results, but none is of a line that the input has."""
        query = "SELECT 1 FROM lines WHERE state = ? AND number > 0 LIMIT 1"
        return not self._had_results or self._db.execute(query, (FINISHED,)).fetchone() is not None

    def _end_reading(self) -> None:
        gone = "SELECT id FROM lines WHERE number < 0 AND state IN (?, ?)"
        self._db.execute(f"INSERT OR IGNORE INTO outdated {gone}", (IN_FLIGHT, FINISHED))
        self._db.execute("DELETE FROM lines WHERE number < 0")
        self.find_twins()

    def find_twins(self) -> None:
        """Let lines wait for identical ones that have not ended, and for no other ones."""
        self._pending = None
        self._db.execute("UPDATE lines SET state = 0 WHERE state = ?", (TWIN,))
        self._db.execute(
            "UPDATE lines SET state = ? WHERE state = 0 AND merges AND EXISTS (SELECT 1 FROM lines AS first WHERE "
            "first.merges AND first.hash = lines.hash AND first.number < lines.number AND first.state IN (0, 1, 4))",
            (TWIN,),
        )

    def retry_failed(self) -> None:
        """Lines that have failed wait again."""
        self._db.execute("UPDATE lines SET state = 0, tries = 0 WHERE state = ?", (FAILED,))

    def is_outdated(self, line_id: Any = None) -> bool:
        """True for an id whose result is not wanted any more, without one if there are any; until `forget_outdated`."""
        query = "SELECT 1 FROM outdated WHERE id = coalesce(?, id) LIMIT 1"
        key = None if line_id is None else _written(line_id)
        return self._db.execute(query, (key,)).fetchone() is not None

    def forget_outdated(self) -> None:
        """The output has their results no more."""
        self._db.execute("DELETE FROM outdated")

    def has_failed(self, line_id: Any) -> bool:
        """True for a line that has failed for good."""
        return self._state_of(_written(line_id)) == FAILED

    def _state_of(self, key: str) -> int | None:
        row = self._db.execute("SELECT state FROM lines WHERE id = ?", (key,)).fetchone()
        return None if row is None else int(row[0])

    # Planning

    def count(self, state: int) -> int:
        """Lines in a state; looks at all lines."""
        return int(self._db.execute("SELECT count(*) FROM lines WHERE state = ?", (state,)).fetchone()[0])

    def in_flight(self, model: str | None = None) -> int:
        """Lines in flight, of a model or all."""
        query = "SELECT count(*) FROM lines INDEXED BY chunks WHERE state = 1 AND model = coalesce(?, model)"
        return int(self._db.execute(query, (model,)).fetchone()[0])

    @property
    def pending(self) -> Mapping[str, int]:
        """Model → lines that wait for it, if there are any. Counted once, then kept."""
        if self._pending is None:
            rows = self._db.execute("SELECT model, count(*) FROM lines WHERE state = 0 GROUP BY model")
            self._pending = Counter(dict(rows.fetchall()))
        return +self._pending

    def _now_pending(self, models: Iterable[str]) -> None:
        if self._pending is not None:
            self._pending.update(models)

    def next_lines(self, model: str, count: int) -> list[StoredLine]:
        """Neighbours that wait, in the order of their keys. One that failed before comes last, and alone."""
        query = (
            f"SELECT {_LINE} FROM lines WHERE state = 0 AND model = ? ORDER BY model, tries > 0, key, number LIMIT ?"
        )
        found = [_stored(row) for row in self._db.execute(query, (model, count))]
        fresh = [line for line in found if not line.tries]
        return fresh or found[:1]

    def take(self, chunk: str, lines: Sequence[StoredLine]) -> None:
        """These are in flight now, in this chunk."""
        if self._pending is not None:
            self._pending.subtract(line.model for line in lines)
        rows = [(IN_FLIGHT, chunk, place, line.number) for place, line in enumerate(lines)]
        self._db.executemany("UPDATE lines SET state = ?, chunk = ?, place = ? WHERE number = ?", rows)

    def give_back(self, chunk: str, *, tried: bool) -> int:
        """What is still in flight of a chunk waits again; returns how many lines. `tried` counts as an attempt."""
        models = self._db.execute("SELECT model FROM lines WHERE state = 1 AND chunk = ?", (chunk,)).fetchall()
        self._now_pending(row[0] for row in models)
        query = (
            "UPDATE lines SET state = 0, chunk = NULL, place = NULL, tries = tries + ? WHERE state = 1 AND chunk = ?"
        )
        return self._db.execute(query, (int(tried), chunk)).rowcount

    def chunks(self) -> list[str]:
        """Chunks in flight."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT chunk FROM lines WHERE state = 1")]

    def line(self, chunk: str, place: int) -> StoredLine | None:
        """A line in flight by its place in its chunk; None if it has ended already."""
        query = f"SELECT {_LINE} FROM lines WHERE state = 1 AND chunk = ? AND place = ?"
        row = self._db.execute(query, (chunk, place)).fetchone()
        return None if row is None else _stored(row)

    # Results

    def twins(self, line: StoredLine, limit: int) -> list[StoredLine]:
        """Lines that wait for what becomes of this one."""
        query = (
            f"SELECT {_LINE} FROM lines WHERE merges AND hash = (SELECT hash FROM lines WHERE number = ?) "
            "AND state = ? LIMIT ?"
        )
        return [_stored(row) for row in self._db.execute(query, (line.number, TWIN, limit))]

    def finish(self, line: StoredLine, *, failed: bool = False, outcome: str | None = None) -> None:
        """A line has ended; `outcome` is kept until it is its turn to be written."""
        if line.state == PENDING and self._pending is not None:
            self._pending[line.model] -= 1
        state = FAILED if failed else FINISHED
        self._db.execute(
            "UPDATE lines SET state = ?, chunk = NULL, place = NULL, outcome = ? WHERE number = ?",
            (state, outcome, line.number),
        )

    def try_again(self, line: StoredLine) -> None:
        """A line in flight waits again, after one more attempt."""
        self._now_pending([line.model])
        self._db.execute(
            "UPDATE lines SET state = 0, chunk = NULL, place = NULL, tries = tries + 1 WHERE number = ?", (line.number,)
        )

    def tried_out(self, max_tries: int) -> list[StoredLine]:
        """Lines that wait although they have been tried so often."""
        query = f"SELECT {_LINE} FROM lines WHERE state = 0 AND tries >= ?"
        return [_stored(row) for row in self._db.execute(query, (max_tries,))]

    def finish_by_id(self, line_id: Any) -> bool:
        """Note that the output has the result of a line.

        Return True if this file did not know of the result, and the result was computed for this very line.
        """
        key = _written(line_id)
        state = self._state_of(key)
        query = (
            "UPDATE lines SET state = 2, chunk = NULL, place = NULL, outcome = NULL WHERE id = ? "
            "AND (state IN (0, 1, 4) OR outcome IS NOT NULL)"
        )
        self._db.execute(query, (key,))
        return state in (PENDING, IN_FLIGHT)

    def open_lines(self) -> Iterator[tuple[int, LineId]]:
        """Number and id of each line that has not ended, in order."""
        query = "SELECT number, id FROM lines WHERE number > 0 AND state NOT IN (?, ?) ORDER BY number"
        for number, key in self._db.execute(query, (FINISHED, FAILED)):
            yield number, json.loads(key)

    def first_open(self, start: int) -> int | None:
        """The number of the first line from `start` on that has not ended; None if all have."""
        query = "SELECT number FROM lines WHERE number >= ? AND state NOT IN (?, ?) ORDER BY number LIMIT 1"
        row = self._db.execute(query, (start, FINISHED, FAILED)).fetchone()
        return None if row is None else int(row[0])

    def held(self, limit: int, before: int | None = None) -> list[tuple[int, str]]:
        """Number and outcome of lines that are finished and not written, in order; `before` a line, or of all."""
        query = (
            "SELECT number, outcome FROM lines WHERE outcome IS NOT NULL AND number < coalesce(?, number + 1) "
            "ORDER BY number LIMIT ?"
        )
        return self._db.execute(query, (before, limit)).fetchall()

    def drop_outcomes(self, numbers: Iterable[int]) -> None:
        """They are written."""
        self._db.executemany("UPDATE lines SET outcome = NULL WHERE number = ?", ((number,) for number in numbers))

    def shrink(self) -> None:
        """Keeps ids, hashes and states of finished lines only: what is needed to know them again."""
        self._db.execute("UPDATE lines SET key = '', params = '{}', columns = '{}' WHERE state = ?", (FINISHED,))
        self._db.execute("VACUUM")

    def close(self) -> None:
        self._db.close()

    def remove(self) -> None:
        """Close the file and delete it."""
        self.close()
        for path in (self.path, *(self.path.with_name(self.path.name + end) for end in ("-wal", "-shm"))):
            path.unlink(missing_ok=True)


def _written(line_id: Any) -> str:
    """An id as the file has it."""
    return json.dumps(line_id, ensure_ascii=False)


def _stored(row: tuple[Any, ...]) -> StoredLine:
    number, id_, form, kind, model, params, tries, place, state, columns = row
    return StoredLine(
        number=number,
        id=json.loads(id_),
        form=form,
        kind=kind,
        model=model,
        params=json.loads(params),
        tries=tries,
        place=place,
        state=state,
        columns=json.loads(columns),
    )
