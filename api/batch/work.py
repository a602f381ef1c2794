"""A run's work file, which is an SQLite database with the state of each line.

Memory use does not grow with the number of lines.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .lines import BatchLine, LineId, StoredLine

PENDING, IN_FLIGHT, FINISHED, FAILED, TWIN = range(5)  # a twin waits for the outcome of an identical line
LINES_PER_TRANSACTION = 2000  # when the input is read for the first time, which limits the size of the log on disk
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS outdated (id TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS lines (
  number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, hash TEXT NOT NULL, form TEXT NOT NULL, kind TEXT NOT NULL,
  model TEXT NOT NULL, key TEXT NOT NULL, params TEXT NOT NULL,
  state INTEGER NOT NULL DEFAULT 0, tries INTEGER NOT NULL DEFAULT 0, chunk TEXT, place INTEGER, outcome TEXT,
  merges INTEGER NOT NULL DEFAULT 0, columns TEXT NOT NULL DEFAULT '{}', request TEXT NOT NULL DEFAULT '{}'
);
CREATE INDEX IF NOT EXISTS plan ON lines (model, tries > 0, key, number) WHERE state = 0;
CREATE INDEX IF NOT EXISTS chunks ON lines (chunk) WHERE state = 1;
CREATE INDEX IF NOT EXISTS twins ON lines (hash, number) WHERE merges;
CREATE INDEX IF NOT EXISTS held ON lines (number) WHERE outcome IS NOT NULL;
"""
_LINE = "number, id, form, kind, model, params, tries, place, state, columns, request"


class WorkFile:
    """A run's lines and their states. Only one command at a time can open the file."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and lock it. Raises sqlite3.OperationalError if another command uses it."""
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
            if "request" not in {row[1] for row in self._db.execute("PRAGMA table_info(lines)")}:  # an earlier version
                self._db.execute("ALTER TABLE lines ADD COLUMN request TEXT NOT NULL DEFAULT '{}'")
        except BaseException:
            self._db.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all changes made in the `with` block to disk, or none of them if the block raises."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:  # SQLite rolls back itself if the disk is full
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def get(self, name: str, default: str = "") -> str:
        """Return the value of a run property."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else default

    def set(self, **properties: str | int) -> None:
        """Set run properties."""
        rows = [(name, str(value)) for name, value in properties.items()]
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)

    # Reading the input

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context manager in which the caller adds all of the input's lines.

        When the context ends, lines that are no longer in the input are deleted. If the context raises, the previously
        read lines remain. When the input is read for the first time, its lines are committed in several parts.
        """
        self._is_first_reading = self._db.execute("SELECT 1 FROM lines LIMIT 1").fetchone() is None
        self._had_results = self.count(FINISHED) > 0
        with self.transaction():
            # Lines of an earlier reading have negative numbers until the input has them again.
            self._db.execute("UPDATE lines SET number = -number WHERE number > 0")
            yield
            self._end_reading()

    def add(self, line: BatchLine, *, merge: bool = False) -> int | None:
        """Add an input line.

        If an earlier line has the same id, add nothing, and return the earlier line's number. A line whose content has
        not changed since the input was last read keeps its state. With `merge`, the line copies the outcome of an
        earlier line with the same content.
        """
        self._commit_regularly()
        line_id = _id_text(line.id)
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
        names = "number, id, hash, form, kind, model, key, params, merges, columns, request"
        values = (line.number, *texts, merge, json.dumps(line.columns), json.dumps(line.request))
        self._db.execute(f"INSERT INTO lines ({names}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return None

    def _commit_regularly(self) -> None:
        self._num_added += 1
        if self._num_added % LINES_PER_TRANSACTION == 0 and self._is_first_reading:
            self._db.execute("COMMIT")
            self._db.execute("BEGIN IMMEDIATE")

    def keeps_results(self) -> bool:
        """Return False if there are results, but none of them belongs to a line of the current input.

        Call this method while the input is being read.
        """
        query = "SELECT 1 FROM lines WHERE state = ? AND number > 0 LIMIT 1"
        return not self._had_results or self._db.execute(query, (FINISHED,)).fetchone() is not None

    def drops_results(self) -> bool:
        """Return whether results exist whose lines are no longer in the input.

        Call this method while the input is being read.
        """
        query = "SELECT 1 FROM lines WHERE state = ? AND number < 0 LIMIT 1"
        return self._db.execute(query, (FINISHED,)).fetchone() is not None

    def _end_reading(self) -> None:
        gone = "SELECT id FROM lines WHERE number < 0 AND state IN (?, ?)"
        self._db.execute(f"INSERT OR IGNORE INTO outdated {gone}", (IN_FLIGHT, FINISHED))
        self._db.execute("DELETE FROM lines WHERE number < 0")
        self.find_twins()

    def find_twins(self) -> None:
        """Mark a pending line as a twin if an identical earlier line has no outcome yet. Other twins become pending."""
        self._pending = None
        self._db.execute("UPDATE lines SET state = 0 WHERE state = ?", (TWIN,))
        self._db.execute(
            "UPDATE lines SET state = ? WHERE state = 0 AND merges AND EXISTS (SELECT 1 FROM lines AS first WHERE "
            "first.merges AND first.hash = lines.hash AND first.number < lines.number AND first.state IN (0, 1, 4))",
            (TWIN,),
        )

    def retry_failed(self) -> None:
        """Mark failed lines as pending again."""
        self._db.execute("UPDATE lines SET state = 0, tries = 0 WHERE state = ?", (FAILED,))

    def is_outdated(self, line_id: Any = None) -> bool:
        """Return whether the result for an id is outdated. Without an id, return whether any result is outdated."""
        query = "SELECT 1 FROM outdated WHERE id = coalesce(?, id) LIMIT 1"
        key = None if line_id is None else _id_text(line_id)
        return self._db.execute(query, (key,)).fetchone() is not None

    def forget_outdated(self) -> None:
        """Delete the outdated ids, after their results have been removed from the output."""
        self._db.execute("DELETE FROM outdated")

    def has_failed(self, line_id: Any) -> bool:
        """Return whether the line with this id has failed."""
        return self._state_of(_id_text(line_id)) == FAILED

    def _state_of(self, key: str) -> int | None:
        row = self._db.execute("SELECT state FROM lines WHERE id = ?", (key,)).fetchone()
        return None if row is None else int(row[0])

    # Planning

    def count(self, state: int) -> int:
        """Return the number of lines that are in this state. This method scans all lines."""
        return int(self._db.execute("SELECT count(*) FROM lines WHERE state = ?", (state,)).fetchone()[0])

    def in_flight(self, model: str | None = None) -> int:
        """Return the number of lines in flight, either for one model or for all models."""
        query = "SELECT count(*) FROM lines INDEXED BY chunks WHERE state = 1 AND model = coalesce(?, model)"
        return int(self._db.execute(query, (model,)).fetchone()[0])

    @property
    def pending(self) -> Mapping[str, int]:
        """Return the number of pending lines, keyed by model.

        The lines are counted once, and the counts are updated from then on.
        """
        if self._pending is None:
            rows = self._db.execute("SELECT model, count(*) FROM lines WHERE state = 0 GROUP BY model")
            self._pending = Counter(dict(rows.fetchall()))
        return +self._pending

    def _add_pending(self, models: Iterable[str]) -> None:
        if self._pending is not None:
            self._pending.update(models)

    def next_lines(self, model: str, count: int) -> list[StoredLine]:
        """Return up to `count` pending lines in key order.

        Previously tried lines come last, one per call, because they may have crashed their workers.
        """
        query = (
            f"SELECT {_LINE} FROM lines WHERE state = 0 AND model = ? ORDER BY model, tries > 0, key, number LIMIT ?"
        )
        found = [_stored(row) for row in self._db.execute(query, (model, count))]
        untried = [line for line in found if not line.tries]
        return untried or found[:1]

    def take(self, chunk: str, lines: Sequence[StoredLine]) -> None:
        """Mark lines as in flight in this chunk."""
        if self._pending is not None:
            self._pending.subtract(line.model for line in lines)
        rows = [(IN_FLIGHT, chunk, place, line.number) for place, line in enumerate(lines)]
        self._db.executemany("UPDATE lines SET state = ?, chunk = ?, place = ? WHERE number = ?", rows)

    def give_back(self, chunk: str, *, tried: bool) -> int:
        """Make a chunk's unfinished lines pending again, and return their number.

        If `tried` is true, count an attempt for each line.
        """
        models = self._db.execute("SELECT model FROM lines WHERE state = 1 AND chunk = ?", (chunk,)).fetchall()
        self._add_pending(row[0] for row in models)
        query = (
            "UPDATE lines SET state = 0, chunk = NULL, place = NULL, tries = tries + ? WHERE state = 1 AND chunk = ?"
        )
        return self._db.execute(query, (int(tried), chunk)).rowcount

    def chunks(self) -> list[str]:
        """Return the ids of the chunks in flight."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT chunk FROM lines WHERE state = 1")]

    def line(self, chunk: str, place: int) -> StoredLine | None:
        """Return the in-flight line at this position in a chunk, or None if the line already has an outcome."""
        query = f"SELECT {_LINE} FROM lines WHERE state = 1 AND chunk = ? AND place = ?"
        row = self._db.execute(query, (chunk, place)).fetchone()
        return None if row is None else _stored(row)

    # Results

    def twins(self, line: StoredLine, limit: int) -> list[StoredLine]:
        """Return up to `limit` twins of a line."""
        query = (
            f"SELECT {_LINE} FROM lines WHERE merges AND hash = (SELECT hash FROM lines WHERE number = ?) "
            "AND state = ? LIMIT ?"
        )
        return [_stored(row) for row in self._db.execute(query, (line.number, TWIN, limit))]

    def finish(self, line: StoredLine, *, failed: bool = False, outcome: str | None = None) -> None:
        """Mark a line as finished or failed. `outcome` is stored until the result is written in order."""
        if line.state == PENDING and self._pending is not None:
            self._pending[line.model] -= 1
        state = FAILED if failed else FINISHED
        self._db.execute(
            "UPDATE lines SET state = ?, chunk = NULL, place = NULL, outcome = ? WHERE number = ?",
            (state, outcome, line.number),
        )

    def retry(self, line: StoredLine) -> None:
        """Make an in-flight line pending again, and count an attempt."""
        self._add_pending([line.model])
        self._db.execute(
            "UPDATE lines SET state = 0, chunk = NULL, place = NULL, tries = tries + 1 WHERE number = ?", (line.number,)
        )

    def tried_out(self, max_tries: int) -> list[StoredLine]:
        """Return the pending lines that were tried at least `max_tries` times."""
        query = f"SELECT {_LINE} FROM lines WHERE state = 0 AND tries >= ?"
        return [_stored(row) for row in self._db.execute(query, (max_tries,))]

    def finish_by_id(self, line_id: Any) -> bool:
        """Mark a line as finished because the output contains its result.

        Return whether the line was unfinished in this file and its result was not copied from an identical line.
        """
        key = _id_text(line_id)
        state = self._state_of(key)
        query = (
            "UPDATE lines SET state = 2, chunk = NULL, place = NULL, outcome = NULL WHERE id = ? "
            "AND (state IN (0, 1, 4) OR outcome IS NOT NULL)"
        )
        self._db.execute(query, (key,))
        return state in (PENDING, IN_FLIGHT)

    def open_lines(self) -> Iterator[tuple[int, LineId]]:
        """Yield the number and id of each unfinished line in order."""
        query = "SELECT number, id FROM lines WHERE number > 0 AND state NOT IN (?, ?) ORDER BY number"
        for number, key in self._db.execute(query, (FINISHED, FAILED)):
            yield number, json.loads(key)

    def first_open(self, start: int) -> int | None:
        """Return the number of the first unfinished line at or after `start`, or None if all lines have an outcome."""
        query = "SELECT number FROM lines WHERE number >= ? AND state NOT IN (?, ?) ORDER BY number LIMIT 1"
        row = self._db.execute(query, (start, FINISHED, FAILED)).fetchone()
        return None if row is None else int(row[0])

    def held(self, limit: int, before: int | None = None) -> list[tuple[int, str]]:
        """Return the number and outcome of each finished but unwritten line that precedes line `before`, in order."""
        query = (
            "SELECT number, outcome FROM lines WHERE outcome IS NOT NULL AND number < coalesce(?, number + 1) "
            "ORDER BY number LIMIT ?"
        )
        return self._db.execute(query, (before, limit)).fetchall()

    def results(self) -> Iterator[tuple[int, dict[str, Any], str]]:
        """Yield the number, columns and outcome of each result that is not in the output, in order."""
        query = "SELECT number, columns, outcome FROM lines WHERE state = ? AND outcome IS NOT NULL ORDER BY number"
        for number, columns, outcome in self._db.execute(query, (FINISHED,)):
            yield number, json.loads(columns), outcome

    def kinds(self) -> list[str]:
        """Return the distinct kinds of all lines."""
        return [row[0] for row in self._db.execute("SELECT DISTINCT kind FROM lines")]

    def sample(self, count: int) -> list[StoredLine]:
        """Return up to `count` lines spread evenly over the input."""
        (total,) = self._db.execute("SELECT count(*) FROM lines").fetchone()
        step = max(1, total // count)
        query = f"SELECT {_LINE} FROM (SELECT *, row_number() OVER (ORDER BY number) AS rank FROM lines) "
        query += "WHERE (rank - 1) % ? = 0 LIMIT ?"
        return [_stored(row) for row in self._db.execute(query, (step, count))]

    def drop_outcomes(self, numbers: Iterable[int]) -> None:
        """Delete the outcomes of lines whose results or errors have been written to the output."""
        self._db.executemany("UPDATE lines SET outcome = NULL WHERE number = ?", ((number,) for number in numbers))

    def shrink(self) -> None:
        """Delete the contents of finished lines.

        Ids, hashes and states remain in the file so that a later command can find them.
        """
        self._db.execute(
            "UPDATE lines SET key = '', params = '{}', columns = '{}', request = '{}' WHERE state = ?", (FINISHED,)
        )
        self._db.execute("VACUUM")

    def size_bytes(self) -> int:
        """Return the file's size in bytes."""
        pages, size = (self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        return int(pages * size)

    def close(self) -> None:
        self._db.close()

    def remove(self) -> None:
        """Close and delete the file."""
        self.close()
        for path in (self.path, *(self.path.with_name(self.path.name + end) for end in ("-wal", "-shm"))):
            path.unlink(missing_ok=True)


def _id_text(line_id: Any) -> str:
    """Return an id in the format used in the file."""
    return json.dumps(line_id, ensure_ascii=False)


def _stored(row: tuple[Any, ...]) -> StoredLine:
    number, id_, form, kind, model, params, tries, place, state, columns, request = row
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
        request=json.loads(request),
    )
