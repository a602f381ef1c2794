"""What happens to a keyword that can't be enforced, and how much work a schema may cause. Pure."""

from __future__ import annotations

from cellama.engine.errors import InvalidRequest

from .document import Document

MAX_WORK = 8_000  # shapes and schemas looked at: some 100 ms


class Inexpressible(Exception):
    """The opposite of a keyword can't be enforced. `str(error)` says why."""


class Policy:
    """Strict use refuses what can't be enforced; otherwise it is ignored, with a warning."""

    def __init__(self, document: Document, where: str, strict: bool) -> None:
        self._document = document
        self._where = where
        self.strict = strict
        self._warnings: dict[str, None] = {}
        self._work = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def cannot(self, path: str, keyword: str, reason: str) -> None:
        """A keyword at this path can't be enforced. Raises InvalidRequest in strict use."""
        if self.strict:
            raise self._document.refused(
                f"{path}/{keyword}",
                f": {keyword!r} can't be enforced: {reason}; leave it out, or turn off strict so that it is ignored",
            )
        self._warnings[f"{self._where} at {path}: {keyword!r} is not enforced"] = None

    def spend(self, count: int = 1) -> None:
        """Raises InvalidRequest when the schema has caused too much work."""
        self._work += count
        if self._work > MAX_WORK:
            raise InvalidRequest(
                f"{self._where} has too many schemas or alternatives; use fewer, or combine fewer of them with "
                "allOf, anyOf, oneOf, not and if"
            )
