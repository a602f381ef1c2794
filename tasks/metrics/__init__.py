"""Define, count and serve the metrics for Prometheus (docs/adr/023-metrics.md).

`table` has no dependencies. `figures` and `exposition` need prometheus_client (`cellama[metrics]`). This package may
import `contract`.
"""
