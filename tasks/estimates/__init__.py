"""Estimate how long a job waits for a slot, from samples of the work of earlier jobs (docs/adr/013-estimates.md).

Workers write the samples, and clients read them. This package may import `state`, `connection` and `contract`.
"""
