"""What Prometheus gets: one table of all metrics, counting, and the text format (docs/adr/023-metrics.md).

`table`, `rows` and `bounded` need no package beside Python's; the others need prometheus_client (`cellama[metrics]`).
May use: `contract`.
"""
