"""Signatures of reasoning: whoever sends it back with a conversation can't have changed it, or what was said before."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

_SIGNED = ("role", "content", "tool_calls", "tool_call_id", "name")  # of earlier messages; not their thoughts


class Signer:
    """Signs texts with HMAC-SHA256. Without a key every signature is empty, and none is accepted."""

    def __init__(self, key: str | None, conversation: str = "") -> None:
        """`conversation` is a digest of what the texts answer to."""
        self._key = key
        self._conversation = conversation

    @property
    def has_key(self) -> bool:
        """False if its signatures are empty."""
        return self._key is not None

    def after(self, messages: Sequence[Mapping[str, Any]]) -> Signer:
        """Signs what is thought of these messages: in another conversation the same thought has another signature."""
        return self if self._key is None else Signer(self._key, _digest(messages))

    def sign(self, text: str) -> str:
        """The signature in hex."""
        if self._key is None:
            return ""
        return hmac.new(self._key.encode(), f"{self._conversation}\n{text}".encode(), hashlib.sha256).hexdigest()

    def verifies(self, text: str, signature: str) -> bool:
        """True if this is the signature of the text."""
        return bool(self._key) and hmac.compare_digest(self.sign(text), signature)


def _digest(messages: Sequence[Mapping[str, Any]]) -> str:
    """Whether content is missing or empty makes no difference, nor what was thought: templates leave that out, too."""
    kept = [{name: message[name] for name in _SIGNED if message.get(name)} for message in messages]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
