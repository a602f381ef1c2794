"""The settings of metrics (docs/operations/monitoring.md)."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings


class MetricsSettings(BaseSettings):
    """Those among all settings that say where Prometheus finds figures."""

    metrics_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="of a worker's `/metrics`; each of a machine has its own; default: none",
    )
    metrics_host: str = Field(
        default="127.0.0.1", min_length=1, description="address of that port; whoever reaches it reads it without a key"
    )
    gateway_metrics_token: SecretStr | None = Field(
        default=None,
        min_length=16,
        description="opens the gateway's `/metrics` (`Authorization: Bearer …`); default: it is for this machine only",
    )
    board_url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="of the board in Grafana: Flower links to it"
    )
