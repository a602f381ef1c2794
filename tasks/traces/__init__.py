"""Spans of jobs for OpenTelemetry, and how their context travels (docs/adr/024-traces.md).

`carrier`, `gate` and `attributes` need no package beside Python's; the others are imported once the setting `traces` is
on (`cellama[otel]`). May use: `contract`.
"""
