"""How the next token is chosen from logits.

May use: `errors`, `events`, `options`. numpy only.
"""
