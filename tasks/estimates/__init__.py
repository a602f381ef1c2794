"""Estimate how long a job waits for a slot, based on samples from earlier jobs (docs/adr/013-estimates.md).

Workers write the samples, and clients read them. This package may import `state`, `connection` and `contract`.
"""
