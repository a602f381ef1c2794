"""The settings of the gateway (docs/how-to/gateway.md)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings


class GatewaySettings(BaseSettings):
    """Those among all settings that only the gateway reads."""

    gateway_max_body_bytes: int = Field(default=16 << 20, ge=1024, description="size of a request's body over HTTP")
    gateway_max_wait_s: int = Field(
        default=600,
        ge=0,
        description="requests that would wait longer for a slot get 429, but for those of the tier `flex`; 0 = none do",
    )
    gateway_keepalive_s: int = Field(
        default=10, ge=1, description="after so long without a token a stream gets a comment, the first time, too"
    )
    gateway_keys_file: Path | None = Field(
        default=None, description="TOML or JSON with API keys; default: those that `cellama keys` keeps in Redis"
    )
