"""What Prometheus gets: one table of all metrics, counting, and the text format (docs/adr/023-metrics.md).

`table` needs no package besides Python's. `figures` and `exposition` need prometheus_client (`cellama[metrics]`).
May use: `contract`.
"""
