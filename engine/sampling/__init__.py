"""Sample the next token from logits with numpy only.

May use: `errors`, `events`, `options`.
"""
