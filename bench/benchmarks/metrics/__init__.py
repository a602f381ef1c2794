"""Metrics under load: what a Prometheus has of them, against what the client of the load counts and times."""
