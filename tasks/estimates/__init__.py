"""How long a job waits for its turn: what jobs took is learnt, and what is ahead of a job is played through.

Used by clients, and by workers to write down what jobs took. May use: `state`, `connection`, `contract`. The why is in
docs/adr/013-estimates.md.
"""
