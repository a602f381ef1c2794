"""The format of API keys, `sk-ID-SECRET`, and the stored entry of a key, with its public id, digest, rights and limits.

A secret has 238 random bits, so it can't be derived from its SHA-256. Only passwords need slow hash functions.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_serializer,
)

ID_CHARS, SECRET_CHARS = 12, 40
KEY_ID = rf"^[a-z0-9]{{{ID_CHARS}}}$"
DIGEST = r"^sha256:[0-9a-f]{64}$"
_KEY = re.compile(rf"sk-([a-z0-9]{{{ID_CHARS}}})-([A-Za-z0-9]{{{SECRET_CHARS}}})", re.ASCII)
_ID_ALPHABET = string.ascii_lowercase + string.digits
_SECRET_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class KeyText:
    """A complete key with its secret, which only the key's owner knows."""

    id: str
    text: str = field(repr=False)

    @property
    def digest(self) -> str:
        """The digest stored in place of the key."""
        return "sha256:" + hashlib.sha256(self.text.encode("ascii")).hexdigest()

    def has_digest(self, digest: str) -> bool:
        """Return whether the key matches this digest, using a constant-time comparison."""
        return hmac.compare_digest(self.digest, digest)


def new_key() -> KeyText:
    """Return a new random key."""
    key_id = "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_CHARS))
    secret = "".join(secrets.choice(_SECRET_ALPHABET) for _ in range(SECRET_CHARS))
    return KeyText(key_id, f"sk-{key_id}-{secret}")


def parse_key(text: str) -> KeyText | None:
    """Return the parts of a key, or None if the text is not in the key format."""
    found = _KEY.fullmatch(text)
    return found and KeyText(found[1], text)


def sent_key(headers: Mapping[str, str]) -> str | None:
    """Return the key that a client sent in the `Authorization` (OpenAI) or `x-api-key` (Anthropic) header."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return headers.get("x-api-key", "").strip() or None


TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
Tier = Literal["flex", "default", "priority"]  # the tiers of auth.TIERS
State = Literal["active", "expired", "revoked"]


class KeyEntry(BaseModel):
    """A key's owner, rights and limits, without the key's secret. Entries with unknown fields are invalid."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=KEY_ID, description="key id, which is the part of the key between `sk-` and the secret")
    digest: str = Field(
        pattern=DIGEST, repr=False, description="`sha256:` followed by the SHA-256 digest of the whole key"
    )
    tenant: str = Field(
        description="tenant that owns the key; keys of the same tenant share cached prefixes, files and responses"
    )
    name: str = Field(default="", max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$", description="display name")
    models: Annotated[frozenset[str], Field(min_length=1)] | None = Field(
        default=None, description="ids or aliases of the models that requests may use; default: all"
    )
    adapters: frozenset[str] | None = Field(
        default=None,
        description="names of the LoRA adapters that requests may use, or [] to forbid adapters; default: all",
    )
    priority: Tier | None = Field(
        default=None,
        description="highest service tier that requests may use, and also their default: flex, default or priority",
    )
    admin: bool = Field(
        default=False,
        description="whether the key's owner may see all tenants and manage keys in the console; default: false",
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, description="maximum number of requests in any 60-second period; default: no limit"
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="maximum number of prefilled and generated tokens in any 60-second period; default: no limit",
    )
    concurrent_jobs: int | None = Field(
        default=None, ge=1, description="maximum number of simultaneous jobs; default: no limit"
    )
    created_at: AwareDatetime | None = Field(default=None, description="creation time, with a time zone")
    expires_at: AwareDatetime | None = Field(
        default=None, description="expiry time, with a time zone; default: the key never expires"
    )
    revoked_at: AwareDatetime | None = Field(
        default=None, description="time at which the key is revoked, with a time zone; default: the key is not revoked"
    )

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, tenant: str) -> str:
        if not TENANT.fullmatch(tenant):
            raise ValueError(
                "the value must be 1 to 64 letters (a to z), digits and . _ @ -, starting with a letter or digit"
            )
        return tenant

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit `admin` unless it is set, because cellama versions without this field reject entries that contain it."""
        fields: dict[str, Any] = write(self)
        if not self.admin:
            fields.pop("admin", None)
        return fields

    @field_serializer("models", "adapters")
    def _sorted(self, names: frozenset[str] | None) -> list[str] | None:
        return None if names is None else sorted(names)

    def state(self, now: float) -> State:
        """Return the key's state at this time, which is in Unix seconds."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if _has_passed(self.expires_at, now) else "active"

    @property
    def has_limits(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.concurrent_jobs))


def _has_passed(at: datetime | None, now: float) -> bool:
    return at is not None and at.timestamp() <= now
