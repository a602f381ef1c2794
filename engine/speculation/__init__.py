"""Speculative decoding: draft tokens are decoded with the last token, and accepted while the model samples the same.

May use: `scheduling`, and the packages above it. No llama.cpp and no threads; only `draft_model` reads a clock.
See docs/adr/015-speculation.md.
"""
