"""How a vocabulary spells a text that stands in the middle of another one. Pure."""

from __future__ import annotations

from collections.abc import Callable


def spelled(text: bytes, tokenize: Callable[[str], list[int]], piece_of: Callable[[int], bytes]) -> list[int]:
    """The tokens of a text, none if they can't be known.

    Some vocabularies put a space before a text: then it is looked for behind a line's end.
    """
    readable = text.decode(errors="ignore")  # it may end within a character
    wanted = readable.encode()
    if not text.startswith(wanted):
        return []
    for head in ("", "\n"):
        tokens = tokenize(head + readable)
        pieces = [piece_of(token) for token in tokens]
        for first in range(min(3, len(tokens))):
            if b"".join(pieces[first:]) == wanted:
                return tokens[first:]
    return []
