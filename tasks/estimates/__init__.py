"""How long a job waits for a slot: workers note what jobs took, and clients add up the jobs before one.

May use: `state`, `connection`, `contract`. docs/adr/013-estimates.md says why.
"""
