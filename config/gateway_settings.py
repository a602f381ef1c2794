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
    gateway_files_dir: str | None = Field(
        default=None,
        description="where files and batches lie: a directory that all gateways see, or a URL for fsspec (`s3://…`); "
        "default: `gateway` in `data_dir`",
    )
    gateway_work_dir: Path | None = Field(
        default=None,
        description="where batches run if `gateway_files_dir` is a URL: a directory of this machine; default: "
        "`gateway` in `data_dir`",
    )
    gateway_max_file_bytes: int = Field(default=200 << 20, ge=1024, description="size of a file for batches")
    gateway_max_batch_lines: int = Field(default=50_000, ge=1, description="requests in a file for batches")
    gateway_batches_at_once: int = Field(
        default=4, ge=0, description="batches that one gateway drives at the same time; 0 = it leaves them to others"
    )
    gateway_open_batches: int = Field(
        default=100, ge=1, description="batches of a tenant that have not ended; more are refused with 429"
    )
