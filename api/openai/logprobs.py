"""Logprobs in OpenAI's two forms: of chats, and of texts."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Any

LEAST = -9999.0  # OpenAI's, of a token that can't come; JSON has no infinity
_BYTES = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")  # a token whose bytes are no text by themselves


def bytes_of(text: str) -> bytes:
    """The bytes of a token by its text, as results have it: `bytes:\\xe2\\x82` stands for those that are no text."""
    found = _BYTES.fullmatch(text)
    return text.encode() if found is None else bytes.fromhex(found[1].replace("\\x", ""))


def of_chat(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of some tokens of a chat."""
    content = [
        {
            **_entry(entry["text"], entry["logprob"]),
            "top_logprobs": [
                _entry(text, logprob) for text, (_, logprob) in zip(entry["top_texts"], entry["top"], strict=True)
            ],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def of_text(entries: Sequence[Mapping[str, Any]], first_offset: int = 0) -> dict[str, Any]:
    """Of some tokens of a text; `first_offset` is how many characters were sent before them."""
    decoder, offset, offsets = codecs.getincrementaldecoder("utf-8")("replace"), first_offset, []
    for entry in entries:
        offsets.append(offset)
        offset += len(decoder.decode(bytes_of(entry["text"])))
    return {
        "tokens": [entry["text"] for entry in entries],
        "token_logprobs": [max(LEAST, entry["logprob"]) for entry in entries],
        "top_logprobs": [
            {text: max(LEAST, logprob) for text, (_, logprob) in zip(entry["top_texts"], entry["top"], strict=True)}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(bytes_of(text)), "logprob": max(LEAST, logprob)}
