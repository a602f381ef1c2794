"""What an API key looks like: `sk-ID-SECRET`. The id names it in public; of the rest only a digest is kept.

A secret has 238 random bits, so a plain SHA-256 of it can't be turned back: slow digests are for what people think up.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field

ID_CHARS, SECRET_CHARS = 12, 40
KEY_ID = rf"^[a-z0-9]{{{ID_CHARS}}}$"
DIGEST = r"^sha256:[0-9a-f]{64}$"
_KEY = re.compile(rf"sk-([a-z0-9]{{{ID_CHARS}}})-([A-Za-z0-9]{{{SECRET_CHARS}}})", re.ASCII)
_OF_IDS = string.ascii_lowercase + string.digits
_OF_SECRETS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class KeyText:
    """A key as its owner has it."""

    id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> str:
        """What is kept of it."""
        return "sha256:" + hashlib.sha256(self.text.encode("ascii")).hexdigest()

    def is_of(self, digest: str) -> bool:
        """Whether the digest is of this key; takes as long whichever characters differ."""
        return hmac.compare_digest(self.digest, digest)


def new_key() -> KeyText:
    """A key that has never been."""
    key_id = "".join(secrets.choice(_OF_IDS) for _ in range(ID_CHARS))
    return KeyText(key_id, f"sk-{key_id}-" + "".join(secrets.choice(_OF_SECRETS) for _ in range(SECRET_CHARS)))


def parse_key(text: str) -> KeyText | None:
    """None for what can't be a key of ours."""
    found = _KEY.fullmatch(text)
    return found and KeyText(found[1], text)


def given_key(headers: Mapping[str, str]) -> str | None:
    """What a client sends as its key: OpenAI's as `Authorization: Bearer`, Anthropic's as `x-api-key`."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return headers.get("x-api-key", "").strip() or None
