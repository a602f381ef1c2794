"""Signatures of reasoning: whoever sends it back with a conversation can't have changed it."""

from __future__ import annotations

import hashlib
import hmac


class Signer:
    """Signs texts with HMAC-SHA256. Without a key every signature is empty, and none is accepted."""

    def __init__(self, key: str | None) -> None:
        self._key = key.encode() if key else None

    def sign(self, text: str) -> str:
        """The signature in hex."""
        return "" if self._key is None else hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def verifies(self, text: str, signature: str) -> bool:
        """True if this is the signature of the text."""
        return self._key is not None and hmac.compare_digest(self.sign(text), signature)
