"""Handle keywords that can't be enforced, and limit the work that a schema can cause."""

from __future__ import annotations

from cellama.engine.errors import InvalidRequest

from .document import SchemaDocument

MAX_WORK = 8_000  # maximum number of shapes and schemas to process, which takes about 100 ms


class NegationUnsupported(Exception):
    """The negation of a keyword can't be enforced. The message gives the reason."""


class Policy:
    """Handles keywords that can't be enforced. Strict mode rejects such keywords, and lenient mode warns about them."""

    def __init__(self, document: SchemaDocument, where: str, strict: bool) -> None:
        self._document = document
        self._where = where
        self.strict = strict
        self._warnings: dict[str, None] = {}
        self._work = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warnings)

    def not_enforced(self, path: str, keyword: str, reason: str) -> None:
        """Record that a keyword at this path can't be enforced. Raises InvalidRequest in strict mode."""
        if self.strict:
            raise self._document.error_at(
                f"{path}/{keyword}",
                f": {keyword!r} can't be enforced: {reason}; remove it, or disable strict to ignore it",
            )
        self._warnings[f"{self._where} at {path}: {keyword!r} is not enforced"] = None

    def spend(self, count: int = 1) -> None:
        """Count additional work done for the schema. Raises InvalidRequest if the schema causes too much work."""
        self._work += count
        if self._work > MAX_WORK:
            raise InvalidRequest(
                f"{self._where} has too many schemas or alternatives; use fewer schemas, or combine fewer of them with "
                "allOf, anyOf, oneOf, not and if"
            )
