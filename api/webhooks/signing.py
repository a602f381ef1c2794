"""Calls are signed as Standard Webhooks says (https://www.standardwebhooks.com)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

PREFIX = "whsec_"
SECRET_BYTES = 32
MIN_BYTES, MAX_BYTES = 24, 64  # as the specification has them


def new_secret() -> str:
    """A secret that has never been."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def key_of(secret: str) -> bytes:
    """The bytes of a secret. Raises ValueError."""
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(PREFIX) or not MIN_BYTES <= len(key) <= MAX_BYTES:
        raise ValueError(f"a secret is {PREFIX} and {MIN_BYTES} to {MAX_BYTES} bytes in base64")
    return key


def signed_headers(secret: str, message_id: str, sent_at: int, body: bytes) -> dict[str, str]:
    """The headers by which a receiver knows who sent the body, and when (unix s)."""
    signed = f"{message_id}.{sent_at}.".encode() + body
    digest = hmac.new(key_of(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(sent_at),
        "webhook-signature": "v1," + base64.b64encode(digest).decode(),
    }
