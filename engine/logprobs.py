"""How likely a chosen token was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities, as the model gave them: before penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens and theirs, best first
    text: str = ""  # of the token (`text_of_bytes`); control tokens have none
    top_texts: tuple[str, ...] = ()


def text_of_bytes(data: bytes) -> str:
    """The text of a token.

    Bytes that are none by themselves, as a part of a character, are written as OpenAI does it: `bytes:\\xe2\\x82`.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def with_texts(entry: TokenLogprob, token_bytes: Callable[[int], bytes]) -> TokenLogprob:
    """The same, with the texts of its tokens."""
    tops = tuple(text_of_bytes(token_bytes(token)) for token, _ in entry.top)
    return replace(entry, text=text_of_bytes(token_bytes(entry.token)), top_texts=tops)
