"""Create OpenTelemetry spans for jobs, and propagate their context in headers (docs/adr/024-traces.md).

`gate` and `conventions` have no dependencies. `tracing` needs the extra `cellama[otel]`, and is imported only if the
setting `traces` is true. This package may import `contract`.
"""
