"""What an API key looks like, `sk-ID-SECRET`, and what is kept of it: its id, which names it in public, and a digest.

A secret has 238 random bits, so nobody can find it by its SHA-256. Slow digests are for passwords.
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
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_serializer, field_validator

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


TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
Tier = Literal["flex", "default", "priority"]  # those of callers.TIERS
State = Literal["active", "expired", "revoked"]


class KeyEntry(BaseModel):
    """A key without its secret: whose it is, and what it may. A field that this version does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=KEY_ID, description="the part of the key between `sk-` and the secret")
    digest: str = Field(pattern=DIGEST, repr=False, description="`sha256:` and the SHA-256 of the whole key")
    tenant: str = Field(description="keys of one tenant share prefixes and answers")
    name: str = Field(default="", max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$", description="for people")
    models: Annotated[frozenset[str], Field(min_length=1)] | None = Field(
        default=None, description="ids of the models that it may ask for; default: all"
    )
    adapters: frozenset[str] | None = Field(
        default=None, description="names of the LoRA adapters that requests may name; []: none; default: all"
    )
    priority: Tier | None = Field(
        default=None,
        description="flex, default or priority: the service tier of requests that name none, and the most urgent one",
    )
    requests_per_minute: int | None = Field(default=None, ge=1, description="in any 60 s; default: no limit")
    tokens_per_minute: int | None = Field(
        default=None, ge=1, description="read and generated, in any 60 s; default: no limit"
    )
    concurrent_jobs: int | None = Field(default=None, ge=1, description="at the same time; default: no limit")
    created_at: AwareDatetime | None = Field(default=None, description="a time with its zone")
    expires_at: AwareDatetime | None = Field(default=None, description="a time with its zone; default: never")
    revoked_at: AwareDatetime | None = Field(default=None, description="since then it is as good as none")

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, tenant: str) -> str:
        if not TENANT.fullmatch(tenant):
            raise ValueError("it must be 1 to 64 letters (a to z), digits and . _ @ -, first a letter or a digit")
        return tenant

    @field_serializer("models", "adapters")
    def _in_order(self, names: frozenset[str] | None) -> list[str] | None:
        return None if names is None else sorted(names)

    def state(self, now: float) -> State:
        """What holds at this time (unix s)."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if _is_over(self.expires_at, now) else "active"

    @property
    def has_limits(self) -> bool:
        return any((self.requests_per_minute, self.tokens_per_minute, self.concurrent_jobs))


def _is_over(at: datetime | None, now: float) -> bool:
    return at is not None and at.timestamp() <= now
