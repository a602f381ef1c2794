"""What is kept of an API key."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, field_serializer, field_validator

from .key_text import DIGEST, KEY_ID

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
