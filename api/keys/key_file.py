"""Keys in a file that people write, or a deployment brings: TOML, or JSON where its name ends so."""

from __future__ import annotations

import json
import logging
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cellama.config import SettingsError

from .entry import KeyEntry

log = logging.getLogger(__name__)


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[KeyEntry]


class KeyFile:
    """The keys of a file as it is now: it is read again when it has changed.

    One that can't be read then is told in the log, and the keys that were read last go on to count.
    """

    def __init__(self, path: Path) -> None:
        """Raises SettingsError if the file is not there, or wrong."""
        self._path = path
        self._seen = self._look()
        self._entries = read_keys(path)

    def entries(self) -> dict[str, KeyEntry]:
        """By their ids."""
        seen = self._look()
        if seen != self._seen:
            self._seen = seen
            try:
                self._entries = read_keys(self._path)
                log.info("%d key(s) read from %s", len(self._entries), self._path)
            except SettingsError as error:
                log.error("the keys stay as they were: %s", error)
        return self._entries

    def _look(self) -> tuple[int, ...]:
        """What differs once the file was written or replaced."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """Raises SettingsError with all problems of the file."""
    try:
        text = path.read_text(encoding="utf-8")
        values: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"the file of keys {str(path)!r} can't be read: {error}") from None
    try:
        keys = _Keys.model_validate(values).keys
    except ValidationError as error:
        told = "\n".join(f"{path}: {_explain(problem)}" for problem in error.errors())
        raise SettingsError(told) from None
    entries = {key.id: key for key in keys}
    if len(entries) < len(keys):
        twice = sorted({key.id for key in keys if sum(key.id == other.id for other in keys) > 1})
        raise SettingsError(f"{path}: the key(s) {', '.join(twice)} stand there more than once; delete all but one")
    return entries


def _explain(problem: Any) -> str:
    """Without the value: it may be a key that was put where its digest belongs."""
    where = ".".join(str(part) for part in problem["loc"]) or "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where}: no such field; known: {', '.join(KeyEntry.model_fields)}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"
