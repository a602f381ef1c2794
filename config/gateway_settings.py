"""The settings of the gateway (docs/how-to/gateway.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode

# Browsers write them in small letters; extensions and desktop apps have schemes of their own.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[a-z0-9.\-\[\]:]+", re.ASCII)


class GatewaySettings(BaseSettings):
    """Those among all settings that only the gateway reads."""

    gateway_max_body_bytes: int = Field(default=16 << 20, ge=1024, description="size of a request's body over HTTP")
    gateway_bodies_bytes: int = Field(
        default=512 << 20,
        ge=1024,
        description="memory for the bodies of all requests that are being handled; more get 503",
    )
    gateway_key_bodies_bytes: int = Field(
        default=128 << 20, ge=1024, description="the same for the requests of one API key; more get 429"
    )
    gateway_max_requests: int = Field(
        default=4096, ge=1, description="requests that are handled at the same time, streams included; more get 503"
    )
    gateway_head_timeout_s: int = Field(
        default=10,
        ge=1,
        description="seconds that a connection may take to send the head of a request; then it is closed. Of "
        "`cellama gateway` only: an app that is mounted leaves this to its server",
    )
    gateway_body_timeout_s: int = Field(
        default=30,
        ge=1,
        description="seconds that a body may stay behind 8 KiB per second; then the request gets 408",
    )
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
    gateway_tenant_files: int = Field(
        default=1000,  # each upload counts them: some 5 ms of Redis' time for as many
        ge=1,
        description="files that a tenant may have, those of its batches' answers included; more uploads get 429",
    )
    gateway_tenant_file_bytes: int = Field(
        default=5 << 30, ge=1024, description="size of all files that a tenant may have; more uploads get 429"
    )
    gateway_max_batch_lines: int = Field(default=50_000, ge=1, description="requests in a file for batches")
    gateway_batches_at_once: int = Field(
        default=4, ge=0, description="batches that one gateway drives at the same time; 0 = it leaves them to others"
    )
    gateway_lease_s: int = Field(
        default=30, ge=3, le=50, description="after so long without a sign of its gateway another one drives a batch"
    )
    gateway_open_batches: int = Field(
        default=100, ge=1, description="batches of a tenant that have not ended; more are refused with 429"
    )
    gateway_cors_origins: Annotated[list[str], NoDecode] = Field(
        default=[],
        description="origins, such as https://chat.example.org, whose pages may ask from a browser, and change things "
        "without a key: a JSON list, or with commas between them; `*` is every one. Default: none",
    )
    gateway_webhook_timeout_s: float = Field(
        default=15.0, gt=0, le=60, description="time for an endpoint to answer a webhook"
    )
    gateway_webhook_private: bool = Field(
        default=False, description="webhooks may go to loopback and private addresses, too, and over http"
    )

    @field_validator("gateway_cors_origins", mode="before")
    @classmethod
    def _parse_origins(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not value.startswith("["):
            return [origin.strip() for origin in value.split(",") if origin.strip()]
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"it begins as a JSON list, and is none: {error}") from None

    @field_validator("gateway_cors_origins")
    @classmethod
    def _check_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; write it as https://chat.example.org, without a path")
        if "*" in origins and len(origins) > 1:
            raise ValueError('"*" is every origin; leave the others out')
        return origins
