"""The settings of metrics (docs/operations/monitoring.md)."""

from __future__ import annotations

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings

LEAST_TOKEN = 16  # characters


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
        description="opens the gateway's `/metrics` (`Authorization: Bearer …`), 16 characters or more; default: it is "
        "for this machine only",
    )
    board_url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="of the board in Grafana: Flower links to it"
    )

    @field_validator("gateway_metrics_token")
    @classmethod
    def _check_token(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token) < LEAST_TOKEN:
            raise ValueError(f"it has {len(token)} characters; it must have {LEAST_TOKEN} or more")
        return token
