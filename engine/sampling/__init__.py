"""How the next token is sampled from logits.

May use: `errors`, `events`, `options`. numpy only.
"""
