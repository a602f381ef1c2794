"""Speculative decoding: draft tokens are decoded with the last token, and accepted if the model samples the same ones.

May use: `scheduling`, and the packages above it. This package uses neither llama.cpp nor threads, and only
`draft_model` reads a clock. See docs/adr/015-speculation.md.
"""
