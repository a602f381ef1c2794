"""Sample the next token from logits with numpy only.

This package may import `errors`, `events` and `options`.
"""
