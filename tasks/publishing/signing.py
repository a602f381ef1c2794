"""Signatures of reasoning, by which a worker detects that a caller has changed it, or the messages before it."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

_SIGNED = ("role", "content", "tool_calls", "tool_call_id", "name")  # of earlier messages; not their reasoning


class Signer:
    """Signs texts with HMAC-SHA256. Without a key every signature is empty, and none is accepted."""

    def __init__(self, key: str | None, conversation: str = "") -> None:
        """`conversation` is a digest of the messages before the reasoning."""
        self._key = key or None
        self._conversation = conversation

    @property
    def has_key(self) -> bool:
        """False if its signatures are empty."""
        return self._key is not None

    def after(self, messages: Sequence[Mapping[str, Any]], parent_key: str | None = None) -> Signer:
        """Return a signer of reasoning after these messages: in another conversation the same text is signed otherwise.

        `parent_key` names the context that the messages follow, with all of its tokens.
        """
        if self._key is None:
            return self
        digest = hashlib.sha256(_begun(parent_key))
        for message in messages:
            digest.update(_line(message))
        return Signer(self._key, digest.hexdigest())

    def first_wrong(self, messages: Sequence[Mapping[str, Any]], parent_key: str | None = None) -> int | None:
        """Return the index of the first message whose reasoning does not match its signature; None if all match."""
        so_far = hashlib.sha256(_begun(parent_key))
        for place, message in enumerate(messages):
            signature, signer = message.get("signature"), Signer(self._key, so_far.hexdigest())
            if signature and not signer.verifies(message.get("reasoning") or "", signature):
                return place
            so_far.update(_line(message))
        return None

    def sign(self, text: str) -> str:
        """Return the signature in hex; empty without a key."""
        if self._key is None:
            return ""
        return hmac.new(self._key.encode(), f"{self._conversation}\n{text}".encode(), hashlib.sha256).hexdigest()

    def verifies(self, text: str, signature: str) -> bool:
        """Return whether this is the signature of the text."""
        return self._key is not None and hmac.compare_digest(self.sign(text).encode(), signature.encode())


def _begun(parent_key: str | None) -> bytes:
    """Return the bytes before the messages. No line of a message equals that of a parent."""
    return b"" if parent_key is None else f"after {json.dumps(parent_key)}\n".encode()


def _line(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes. Missing and empty content are equal, and reasoning is left out, as in templates."""
    return json.dumps({name: message[name] for name in _SIGNED if message.get(name)}, sort_keys=True).encode() + b"\n"
