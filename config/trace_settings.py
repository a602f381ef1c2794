"""The settings of logs and traces (docs/operations/monitoring.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings


class TraceSettings(BaseSettings):
    """Those among all settings that say what a process tells of single jobs."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(default="INFO", description="of every process")
    log_format: Literal["text", "json"] = Field(
        default="text", description="json: each line is an object, with the job's id and its trace's where there are"
    )
    traces: bool = Field(
        default=False,
        description="spans of jobs for OpenTelemetry, in workers, gateways and who sends jobs; its own variables "
        "(`OTEL_EXPORTER_OTLP_ENDPOINT`, …) say where they go",
    )
    trace_contents: bool = Field(default=False, description="spans have prompts and what was generated, too")
