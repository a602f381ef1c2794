"""Text that every program can read: half of a surrogate pair has no UTF-8, and JSON lets one write it all the same."""

from __future__ import annotations


def valid_text(text: str) -> str:
    """The text, with U+FFFD for each half of a surrogate pair that stands alone. Models write such ones, too."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
