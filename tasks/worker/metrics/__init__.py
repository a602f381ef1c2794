"""What a worker tells Prometheus of its engines, requests and attempts (docs/adr/023-metrics.md).

May use: `cellama.tasks.metrics`, and what the modules of `worker` may. Only a worker with `metrics_port` imports it.
"""
