"""Estimate how long a job waits for a slot, and how many workers a pool needs, based on samples from earlier jobs.

docs/adr/013-estimates.md and docs/adr/030-scaling.md describe the estimates.

Workers write the samples, and clients read them. This package may import `state`, `connection` and `contract`.
"""
